"""What names of caches need to know of items besides image and caption: size, length, control.

The cache names of sd-scripts hold the size of an image, those of musubi-tuner the clips of a video
too, so that planning must know them. The memo does; a file is opened where its stat is new, and its
header alone is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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
    """Complete items by size, length and control, and find those that a layout cannot have.

    Args:
        layout: names their caches.
        settings: the dataset's section of the configuration.
        root: its folder.
        items: as found there.
        control: what lies in the folder of control images; None where there is none.
        memo: knows sizes; learns new ones.

    Returns:
        The complete items, and what is wrong with the others.
    """
    known = memo.media_below(root)
    probe = probe_video if settings.video else probe_image
    controls = {} if control is None else _controls(control, settings)
    bases: dict[str, str] = {}
    found: list[Item] = []
    faults: list[Fault] = []
    new = sum(known.get(item.image, (None,))[0] != item.image_stat for item in items)
    quiet = new < _LOOKS_LONG
    with Progress(total=new, desc="sizes of images", unit="image", disable=quiet) as progress:
        for item in items:
            base = layout.base(item.stem)
            before = known.get(item.image)
            if before is not None and before[0] == item.image_stat:
                media = before[1]
            else:
                progress.update()
                try:
                    media = probe(item.image)
                except SourceError as error:
                    faults.append(Fault(item.image, item.stem, error.what, error.mend))
                    continue
                memo.learn_media(item.image, item.image_stat, media)
            if base in bases:
                what = f"has the same name as {bases[base]}, and musubi-tuner's caches lie flat"
                faults.append(Fault(item.image, item.stem, what, "rename one of them"))
                continue
            bases[base] = item.image
            name = f"{item.stem.rpartition('/')[2]}{layout.longest_ending}"
            if len(name.encode()) > 255:
                what = "has a name too long for its cache file"
                faults.append(Fault(item.image, item.stem, what, "rename it"))
                continue
            if settings.video and not layout.clips(media, settings):
                what = f"has {media.frames} frames, too few for any clip of target_frames"
                faults.append(Fault(item.image, item.stem, what, "use shorter clips, or remove it"))
                continue
            changes: dict[str, Any] = {"media": media}
            if control is not None:
                if item.stem not in controls:
                    what = f"has no control in {control.root}"
                    mend = f"put {control.root}/{item.stem} there, or remove the item"
                    faults.append(Fault(item.image, item.stem, what, mend))
                    continue
                changes["control"], changes["control_stat"] = controls[item.stem]
            found.append(item._replace(**changes))
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
