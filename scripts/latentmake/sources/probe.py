"""Probe image size, clip length and control file, which some cache names contain.

Names of sd-scripts' caches hold the size of an image, those of musubi-tuner also the clips of a
video. The memo knows them; a file is opened where its stat is new, and as a rule its header alone
is read.
"""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from latentmake import digest
from latentmake.config.datasets import Dataset
from latentmake.config.models import Model
from latentmake.errors import SourceError
from latentmake.files.frames import HungError, probe_videos
from latentmake.files.media import NPZ, probe_image
from latentmake.geometry.buckets import Size, control_size, has_own_sizes, refuse_odd
from latentmake.geometry.clips import Media, Span, Timing, kept_indices
from latentmake.index.memo import Memo, SourceStat
from latentmake.layouts import Layout
from latentmake.progress import Progress
from latentmake.sources.controls import controls_of
from latentmake.sources.item import LAYER, Fault, File, Item, Scan

_NUMBERED = re.compile(r"(.+)\.v([1-9]\d{0,2})", re.DOTALL)
_LOOKS_LONG = 1000  # images whose measuring is worth a progress bar
_LONG_VIDEOS = 20  # the same of videos
_NAMED = 10  # videos that are left out, each with a line
_HUNG_SECONDS = 24 * 3600  # for which a file that hung is not tried again
_GRACE = 0.1  # seconds by which a row may end after its video


@dataclass
class Measured:
    """Items with their sizes, lengths and controls.

    Attributes:
        found: the items.
        faults: of the others.
        short: a line for each video that gives no clip, and is left out.
        notes: further lines about them.
    """

    found: list[Item] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    short: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def lines(self) -> Iterator[str]:
        """Yield the lines to tell the user."""
        yield from self.short[:_NAMED]
        if len(self.short) > _NAMED:
            yield f"{len(self.short) - _NAMED} more videos are left out likewise"
        yield from self.notes


def measured(
    layout: Layout,
    settings: Dataset,
    scan: Scan,
    items: Sequence[Item],
    control: Scan | None,
    memo: Memo,
    model: Model | None = None,
) -> Measured:
    """Complete items by size, length, span and controls.

    `scan` is the listing of the dataset, `control` that of its folder of control images, if any.
    The memo knows sizes and learns new ones. `model` says how many controls an item has, where the
    layout numbers them.
    """
    made = Measured()
    stats = {item.image: item.files[0].stat for item in items}
    known = _probed(scan.roots, stats, memo, video=settings.video)
    controls = _controls(layout, settings, scan, control, items, memo, model)
    bases: dict[str, tuple[str, str]] = {}
    spans: dict[tuple[str, Span], str] = {}
    variable: list[str] = []
    turned: list[str] = []
    for item in items:
        try:
            media = known[item.image]
            if isinstance(media, SourceError):
                raise media
            if item.image.lower().endswith(NPZ):
                _refuse_large(item.image, media, settings.max_image_pixels)
                media = media._replace(timing=f"1/16:1x{media.frames}")
            span = item.span
            if settings.video:
                if model is not None and model.scripted:
                    _refuse_parts(item)
                span = _span(item, settings, media, layout.rate)
                seen = f"{item.image}{item.window or item.span or ''}"
                if span is not None and spans.setdefault((item.image, span), seen) != seen:
                    what = "has the same frames as another row"
                    raise SourceError(what, where=item.image, hint=f"take one of {item.stem} out")
                if settings.source_fps != "auto" and media.timing:
                    variable += [item.image] * Timing.parse(media.timing).is_variable
                turned += [item.image] * (media.rotation != 0 and not settings.display_rotation)
                media = _shown(settings, media)
            _check_name(layout, item, bases, settings.text_variants)
            if settings.video and not layout.clips(media, settings, span):
                _refuse_beyond(item, settings, media, span)
                frames = f"{media.frames} frame{'s' * (media.frames != 1)}"
                what = f"has {frames}, too few for any clip of target_frames"
                if settings.short_videos == "skip":
                    made.short.append(f"{item.where} {what}: it is left out")
                    continue
                hint = "use shorter clips, or remove it"
                raise SourceError(what, where=item.image, hint=hint)
            beside = controls[item.stem]
            if isinstance(beside, SourceError):
                raise beside
            files, sizes = beside
        except SourceError as error:
            made.faults.append(Fault(item.where, item.stem, error.what, error.hint))
            continue
        if files:
            rest = [each for each in item.files if each.role != LAYER]
            layers = [each for each in item.files if each.role == LAYER]
            item = item._replace(files=(*rest, *files, *layers), control_sizes=sizes)
        made.found.append(item._replace(media=media, span=span))
    if settings.multiple_target:
        _set_uneven_aside(made)
    made.notes += _note(variable, "a variable frame rate", "source_fps: auto")
    made.notes += _note(turned, "a rotation for display", "display_rotation: true")
    return made


def _note(paths: list[str], what: str, key: str) -> Iterator[str]:
    """Yield a line about files that a key would treat otherwise, if there are some."""
    several = list(dict.fromkeys(paths))
    if several:
        more = f" and {len(several) - 1} more have" if len(several) > 1 else " has"
        yield f"{several[0]}{more} {what}, which does not count; set `{key}`"


# -- files ----------------------------------------------------------------------------------------


def _probed(
    roots: Iterable[str], stats: dict[str, SourceStat], memo: Memo, *, video: bool
) -> Mapping[str, Media | SourceError]:
    """Return size and length of files below some folders; the memo learns new ones."""
    known = memo.media(stats, *roots)
    found: dict[str, Media | SourceError] = {}
    new: list[str] = []
    for path, stat in stats.items():
        if (there := known.get(path)) is not None and there[0] == stat:
            found[path] = there[1]
        elif (hung := _hung(memo, path, stat)) is not None:
            found[path] = hung
        else:
            new.append(path)
    what, least = ("videos", _LONG_VIDEOS) if video else ("images", _LOOKS_LONG)
    probes = probe_videos(new) if video else map(_image, new)
    with Progress(
        total=len(new), desc=f"sizes of {what}", unit=what[:-1], disable=len(new) < least
    ) as progress:
        for path, media in zip(new, probes, strict=True):
            progress.update()
            found[path] = media
            if not isinstance(media, SourceError):
                memo.learn_media(path, stats[path], media)
            elif isinstance(media, HungError):  # each plan would wait for it again
                fault = json.dumps([time.time(), media.what, media.hint])
                memo.verdicts.learn(_hanging(path, stats[path]), None, fault)
    return found


def image_sizes(
    roots: Iterable[str], stats: dict[str, SourceStat], memo: Memo
) -> dict[str, Size | None]:
    """Return width and height of image files as stored; None of one that cannot be read.

    The memo learns sizes that it does not know; `roots` are the folders that hold the files.
    """
    probed = _probed(roots, stats, memo, video=False)
    return {
        path: Size(media.width, media.height) if isinstance(media, Media) else None
        for path, media in probed.items()
    }


def _hanging(path: str, stat: SourceStat) -> str:
    return digest.of_value(["hangs", path, stat])


def _hung(memo: Memo, path: str, stat: SourceStat) -> SourceError | None:
    """Return the fault of a file whose reading hung within the last day."""
    if (known := memo.verdicts.get(_hanging(path, stat))) is None:
        return None
    moment, what, hint = json.loads(known)
    if time.time() - moment > _HUNG_SECONDS:
        return None
    return SourceError(f"{what} a while ago", where=path, hint=f"{hint}; `touch` it to try again")


def _image(path: str) -> Media | SourceError:
    try:
        return probe_image(path)
    except SourceError as error:
        return error


def _numbered(base: str, bases: Mapping[str, tuple[str, str]], texts: int) -> str | None:
    """Return an image that shares a name with a further text of another: `{base}.v1`."""
    found = _NUMBERED.fullmatch(base)
    if found is not None and 0 < int(found[2]) < texts and found[1] in bases:
        return bases[found[1]][1]
    names = (f"{base}.v{number}" for number in range(1, texts))
    return next((bases[name][1] for name in names if name in bases), None)


def _refuse_large(path: str, media: Media, most: int) -> None:
    """Refuse a clip whose frames are as large as no image may be: a small file can hold many."""
    if media.width * media.height > most:
        what = f"has frames of {media.width} x {media.height} pixels, more than {most} in all"
        hint = "scale them down, or raise max_image_pixels of the dataset"
        raise SourceError(f"{what} (a decompression bomb?)", where=path, hint=hint)


def _check_name(layout: Layout, item: Item, bases: dict[str, tuple[str, str]], texts: int) -> None:
    """Refuse an item whose caches would have the name of another's, or one too long.

    `texts` is the number of an item's texts: those of further ones may have names of their own.
    """
    base = layout.base(item.stem)
    other, image = bases.setdefault(base, (item.stem, item.image))
    name = f"{item.stem.rpartition('/')[2]}{layout.longest_ending}"
    if layout.numbers_variants and texts > 1:
        name += f".v{texts - 1}"
        if taken := _numbered(base, bases, texts):
            what = f"has a name that another text of {taken} is to have"
            raise SourceError(what, where=item.image, hint="rename one of them")
    what = ""
    if other != item.stem:
        what = f"has the same name as {image}, and musubi-tuner's caches lie flat"
    elif len(name.encode()) > 255:
        what = "has a name too long for its cache file"
    if what:
        raise SourceError(
            what, where=item.image, hint="rename one of them" if other != item.stem else "rename it"
        )


# -- controls and layers --------------------------------------------------------------------------


_Controls = tuple[Sequence[File], tuple[Size, ...]]
"""Files of an item's controls, and their sizes where these count."""


def _controls(
    layout: Layout,
    settings: Dataset,
    scan: Scan,
    control: Scan | None,
    items: Sequence[Item],
    memo: Memo,
    model: Model | None,
) -> dict[str, _Controls | SourceError]:
    """Return the controls of each item by its stem, or what is wrong with them."""
    files_of = controls_of(layout, settings, scan, control, items, model)
    found: dict[str, _Controls | SourceError] = {}
    stats: dict[str, SourceStat] = {}
    for item in items:
        try:
            files = files_of(item)
            stats.update((each.path, each.stat) for each in files)
            found[item.stem] = files, ()
        except SourceError as error:
            found[item.stem] = error
    if model is None or settings.video or not has_own_sizes(settings):
        return found
    roots = [*scan.roots, *([] if control is None else [control.root])]
    media = _probed(roots, stats, memo, video=False)
    for item in items:
        each = found[item.stem]
        if not isinstance(each, SourceError):
            found[item.stem] = _sized(model, settings, item, each[0], media)
    return found


def _sized(
    model: Model,
    settings: Dataset,
    item: Item,
    files: Sequence[File],
    media: Mapping[str, Media | SourceError],
) -> _Controls | SourceError:
    """Return the controls of an item with their sizes, or the fault of one."""
    sizes: list[Size] = []
    for _, path, _ in files:
        found = media[path]
        try:
            if isinstance(found, SourceError):
                raise found
            sizes.append(Size(found.width, found.height))
            step, scripts = model.spec.side, model.spec.scripts
            vae = scripts is not None and bool(scripts.latents.files)
            refuse_odd(control_size(sizes[-1], settings, step), step, vae=vae)
        except SourceError as error:
            what = f"has a control {path}, which {error.what}"
            return SourceError(what, where=item.image, hint=error.hint)
    return files, tuple(sizes)


def _set_uneven_aside(made: Measured) -> None:
    """Make those items faulty that have another number of layers than most."""
    counts = Counter(len(item.layers) for item in made.found if item.layers)
    usual = max(counts, key=lambda count: (counts[count], count), default=0)
    found, made.found = made.found, []
    for item in found:
        if item.layers and len(item.layers) == usual:
            made.found.append(item)
            continue
        count = len(item.layers)
        what = f"has {count or 'no'} layer{'s' * (count != 1)}"
        what += f", and others {usual}" * (usual > 0)
        name = item.stem.rpartition("/")[2]
        hint = f"name them {name}_1, {name}_2 and so on, without captions, or remove it"
        made.faults.append(Fault(item.where, item.stem, what, hint))


# -- videos ---------------------------------------------------------------------------------------


def _shown(settings: Dataset, media: Media) -> Media:
    """Return what of a video's size and timing counts with a dataset's settings."""
    timing = media.timing if settings.source_fps == "auto" else ""
    if not settings.display_rotation:
        return media._replace(timing=timing, rotation=0)
    width, height = media.width, media.height
    if media.rotation % 180:
        width, height = height, width
    return media._replace(width=width, height=height, timing=timing)


def _refuse_parts(item: Item) -> None:
    """Refuse a row that musubi-tuner's own scripts cannot be given: a part of a video, or arrays.

    Raises:
        SourceError: it is one.
    """
    if item.image.lower().endswith(NPZ):
        what = "is no video, and musubi-tuner's own scripts read videos alone"
        raise SourceError(what, where=item.image, hint="name a video")
    if item.window is not None or item.span not in (None, Span()):
        what = "is used in part, and musubi-tuner's own scripts read videos from their first frame"
        hint = "take `frames`, `start` and the like out of its row, or cut the video"
        raise SourceError(what, where=item.image, hint=hint)


def _span(item: Item, settings: Dataset, media: Media, rate: float) -> Span | None:
    """Return the frames of a video that an item uses.

    Raises:
        SourceError: timestamps are needed and not known, or the span begins or ends behind the
            video.
    """
    if (settings.source_fps == "auto" or item.window is not None) and not media.timing:
        what = "has frames without timestamps"
        hint = "give frames in place of seconds, and source_fps as a number"
        raise SourceError(what, where=item.image, hint=hint)
    span = item.span or Span()
    if item.window is not None:
        span = _of_seconds(item, settings, media, span, rate)
    if span.first >= media.frames:
        what = f"has {media.frames} frames, and its row begins at frame {span.first}"
        raise SourceError(what, where=item.image, hint="correct the row")
    return None if span == Span() else span


def _of_seconds(item: Item, settings: Dataset, media: Media, span: Span, rate: float) -> Span:
    """Return the span of a row that is given in seconds."""
    assert item.window is not None
    (start, end), timing = item.window, Timing.parse(media.timing)
    seconds = float(timing.seconds)
    if start >= seconds or (end or 0) > seconds + _GRACE:
        what = f"is {seconds:.2f} s long, and its row names {start:g} to {end or 'the end'}"
        raise SourceError(what, where=item.image, hint="correct the row")
    first = timing.index_at(start)
    if end is None:
        return span._replace(first=first)
    last = timing.index_at(end)
    whole = Span(first, None, span.stride)
    kept = kept_indices(last, settings.source_fps, whole, media.timing, rate)
    return span._replace(first=first, frames=len(kept))


def _refuse_beyond(item: Item, settings: Dataset, media: Media, span: Span | None) -> None:
    """Refuse a row that is one clip with frames behind the end of its video."""
    if span is None or not span.single or span.frames is None:
        return
    what = f"names {span.frames} frames from frame {span.first} on"
    if settings.source_fps is None:
        what = f"names frames up to {span.first + (span.frames - 1) * span.stride}"
    what += f", but the video has {media.frames}"
    raise SourceError(what, where=item.image, hint="correct the row, or take it out")
