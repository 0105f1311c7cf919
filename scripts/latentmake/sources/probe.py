"""Probe image size, clip length and control file, which some cache names contain.

Names of sd-scripts' caches hold the size of an image, those of musubi-tuner also the clips of a
video. The memo knows them; a file is opened where its stat is new, and as a rule its header alone
is read.
"""

from __future__ import annotations

from collections.abc import Sequence

from latentmake.config import Dataset
from latentmake.errors import SourceError
from latentmake.files.media import VIDEO_EXTENSIONS, probe_image, probe_video
from latentmake.index.memo import Memo, SourceStat
from latentmake.layouts import Layout
from latentmake.progress import Progress
from latentmake.sources.items import IMAGE_EXTENSIONS, Fault, Item, Scan

__all__ = ["measured"]

_LOOKS_LONG = 1000  # items whose measuring is worth a progress bar


def measured(
    layout: Layout,
    settings: Dataset,
    root: str,
    items: Sequence[Item],
    control: Scan | None,
    memo: Memo,
) -> tuple[list[Item], list[Fault]]:
    """Complete items by size, length and control; return them, and the faults of the others.

    `root` is the dataset's folder, `control` the listing of its folder of control images, if any.
    The memo knows sizes and learns new ones.
    """
    known = memo.media_below(root)
    controls = {} if control is None else _controls(control, settings)
    bases: dict[str, str] = {}
    found: list[Item] = []
    faults: list[Fault] = []
    new = sum(known.get(item.image, (None,))[0] != item.image_stat for item in items)
    quiet = new < _LOOKS_LONG
    with Progress(total=new, desc="sizes of images", unit="image", disable=quiet) as progress:

        def complete(item: Item) -> Item:
            stat, media = known.get(item.image, (None, None))
            if media is None or stat != item.image_stat:
                progress.update()
                media = (probe_video if settings.video else probe_image)(item.image)
                memo.learn_media(item.image, item.image_stat, media)
            other = bases.setdefault(layout.base(item.stem), item.image)
            name = f"{item.stem.rpartition('/')[2]}{layout.longest_ending}"
            what, hint = "", "rename it"
            if other != item.image:
                what = f"has the same name as {other}, and musubi-tuner's caches lie flat"
                hint = "rename one of them"
            elif len(name.encode()) > 255:
                what = "has a name too long for its cache file"
            elif settings.video and not layout.clips(media, settings, item.span):
                what = f"has {media.frames} frames, too few for any clip of target_frames"
                hint = "use shorter clips, or remove it"
            elif control is not None and item.stem not in controls:
                what = f"has no control in {control.root}"
                hint = f"put {control.root}/{item.stem} there, or remove the item"
            if what:
                raise SourceError(what, where=item.image, hint=hint)
            path, control_stat = controls.get(item.stem, (None, None))
            return item._replace(media=media, control=path, control_stat=control_stat)

        for item in items:
            try:
                found.append(complete(item))
            except SourceError as error:
                faults.append(Fault(item.image, item.stem, error.what, error.hint))
    return found, faults


def _controls(control: Scan, settings: Dataset) -> dict[str, tuple[str, SourceStat]]:
    """Return stem -> path and stat of every control image, or video where items are videos."""
    extensions = VIDEO_EXTENSIONS if settings.video else IMAGE_EXTENSIONS
    found: dict[str, tuple[str, SourceStat]] = {}
    for path, *stat in sorted(control.entries):
        stem, dot, extension = path.rpartition(".")
        if dot and stat[0] >= 0 and f".{extension.lower()}" in extensions:
            found.setdefault(stem, (f"{control.root}/{path}", SourceStat(*stat)))
    return found
