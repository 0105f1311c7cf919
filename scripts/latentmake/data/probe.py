"""Probe image size, clip length and control file, which some cache names contain.

Names of sd-scripts' caches hold the size of an image, those of musubi-tuner also the clips of a
video. The memo knows them; a file is opened where its stat is new, and as a rule its header alone
is read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from latentmake.config.datasets import Dataset
from latentmake.config.models import Model
from latentmake.data.clips import refuse_beyond, refuse_parts, used_part
from latentmake.data.controls import controls_of, sizes_of
from latentmake.data.item import LAYER, Fault, File, Item, Scan
from latentmake.errors import SourceError
from latentmake.files.media import probe_image
from latentmake.files.readers import probe_videos
from latentmake.geometry.clips import Media
from latentmake.index.memo import Memo, SourceStat
from latentmake.layouts.layout import Layout
from latentmake.progress import Progress

_LOOKS_LONG = 1000  # images whose measuring is worth a progress bar
_LONG_VIDEOS = 20  # the same of videos
_SHORT = "has too few frames for any clip of target_frames"
_TURNED = "has a rotation for display, which does not count; set `display_rotation: true`"


def measured(
    layout: Layout,
    settings: Dataset,
    scan: Scan,
    items: Sequence[Item],
    control: Scan,
    memo: Memo,
    model: Model,
) -> tuple[list[Item], list[Fault], list[str]]:
    """Complete items by size, length, span and controls.

    `scan` is the listing of the dataset, `control` that of its folder of controls, empty without
    one. The memo knows sizes and learns new ones. `model` says how many controls an item has, where
    the layout numbers them.

    Returns:
        The items, faults of others, and notes for the user about those that are left out.
    """
    found, faults, owners = list[Item](), list[Fault](), dict[str, Item]()
    notes: dict[str, dict[str, None]] = {}  # what is noted of which items
    stats = {item.image: item.files[0].stat for item in items}
    known = probed(scan.roots, stats, memo, video=settings.video)
    controls = controls_of(layout, settings, scan, control, items, model)
    roots = [*scan.roots, *control.roots]

    def measure(files: Sequence[File]) -> Mapping[str, Media | SourceError]:
        return probed(roots, {each.path: each.stat for each in files}, memo, video=False)

    for item in items:
        try:
            media, span = known[item.image], item.span
            if isinstance(media, SourceError):
                raise media
            if settings.video:
                if model.scripted:
                    refuse_parts(item)
                if media.rotation and not settings.display_rotation:
                    notes.setdefault(_TURNED, {})[item.image] = None
                media, span = used_part(item, settings, media, layout.rate)
            _check_name(layout, item, owners, settings.text_variants)
            if settings.video and not layout.clips(media, settings, span):
                refuse_beyond(media, span)
                if settings.short_videos == "error":
                    raise SourceError(_SHORT, hint="use shorter clips, or remove it")
                notes.setdefault(f"{_SHORT}: it is left out", {})[item.where] = None
                continue
            files = controls(item)
            sizes = sizes_of(files, settings, model, measure)
        except SourceError as error:
            faults.append(Fault(item.where, item.stem, error.what, error.hint))
            continue
        if files:
            rest = [each for each in item.files if each.role != LAYER]
            layers = [each for each in item.files if each.role == LAYER]
            item = item._replace(files=(*rest, *files, *layers), control_sizes=sizes)
        found.append(item._replace(media=media, span=span))
    if settings.multiple_target:
        found = [*_even(found, faults)]
    lines = [f"{min(x)} {y}" + f", and {len(x) - 1} more" * (len(x) > 1) for y, x in notes.items()]
    return found, faults, lines


def _even(items: Sequence[Item], faults: list[Fault]) -> Iterator[Item]:
    """Yield the items with as many layers as most have; the others get a fault."""
    counts = Counter(len(item.layers) for item in items if item.layers)
    usual = max(counts, key=lambda count: (counts[count], count), default=0)
    for item in items:
        if (count := len(item.layers)) == usual != 0:
            yield item
            continue
        what = f"has {count or 'no'} layer{'s' * (count != 1)}"
        what += f", and others {usual}" * (usual > 0)
        name = item.stem.rpartition("/")[2]
        hint = f"name them {name}_1, {name}_2 and so on, without captions, or remove it"
        faults.append(Fault(item.where, item.stem, what, hint))


# -- files ----------------------------------------------------------------------------------------


def probed(
    roots: Iterable[str], stats: dict[str, SourceStat], memo: Memo, *, video: bool
) -> Mapping[str, Media | SourceError]:
    """Return size and length of files below some folders; the memo learns new ones."""
    known = memo.media(stats, *roots)
    found: dict[str, Media | SourceError] = {
        path: known[path][1] for path, stat in stats.items() if known.get(path, (None,))[0] == stat
    }
    new = [path for path in stats if path not in found]
    what, least = ("videos", _LONG_VIDEOS) if video else ("images", _LOOKS_LONG)
    probes = probe_videos(new) if video else map(_image, new)
    quiet, pairs = len(new) < least, zip(new, probes, strict=True)
    for path, media in Progress(
        pairs, total=len(new), desc=f"sizes of {what}", unit=what[:-1], disable=quiet
    ):
        found[path] = media
        if not isinstance(media, SourceError):
            memo.learn_media(path, stats[path], media)
    return found


def _image(path: str) -> Media | SourceError:
    try:
        return probe_image(path)
    except SourceError as error:
        return error


def _check_name(layout: Layout, item: Item, owners: dict[str, Item], texts: int) -> None:
    """Refuse an item whose caches would have the name of another's, or one too long.

    `texts` is the number of an item's texts: those of further ones may have names of their own.
    """
    base, name = layout.base(item.stem), item.stem.rpartition("/")[2]
    endings = ["", *(f".v{number}" for number in range(1, texts) if layout.flat)]
    for ending in endings:
        if (other := owners.setdefault(base + ending, item)).stem != item.stem:
            what = f"shares the name {base}{ending} in the cache with {other.image}"
            raise SourceError(what, hint="rename one of them")
    if len(f"{name}{layout.longest_ending}{endings[-1]}".encode()) > 255:
        raise SourceError("has a name too long for its cache file", hint="rename it")
