"""Probe images, videos and controls, because names of cache files depend on them.

The names of sd-scripts' caches contain the size of the image. The names of musubi-tuner's caches
also contain the first frame and the length of a clip. The memo keeps sizes and lengths. A file is
opened only if its stat is new, and usually only its header is read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from latentmake.base.errors import SourceError
from latentmake.base.progress import Progress
from latentmake.config.datasets import Dataset
from latentmake.config.models import Model
from latentmake.data.controls import controls_of, lost_controls
from latentmake.data.item import LAYER, Fault, File, Item, Scan, Window, fault_of
from latentmake.data.memo import Memo
from latentmake.formats.media import probe_image
from latentmake.formats.readers import probe_videos
from latentmake.geometry.buckets import Size, control_size, refuse_odd
from latentmake.geometry.clips import Media, Span, Timing, kept_indices
from latentmake.layouts.layout import Layout

LOOKED_AT = 1000
"""Most files of a dataset that are read for an estimate, because disks are slow."""

_GRACE = 0.1  # seconds by which a row may end after its video


def used_part(
    item: Item, settings: Dataset, media: Media, rate: float
) -> tuple[Media, Span | None]:
    """Return size and timing of a video as its caches depend on them, and the frames to use.

    Timing and rotation are cleared if the settings ignore them.

    Args:
        item: item of the video.
        settings: the dataset's section of the configuration.
        media: size, length and timing as probed.
        rate: frames a second that videos are converted to.

    Returns:
        The size and timing, and the span that the item uses; None for the complete video.

    Raises:
        SourceError: timestamps are needed but not known; the span begins or ends after the end of
            the video; or the frames of an array have more pixels than `max_image_pixels`.
    """
    if item.is_array:
        most = settings.max_image_pixels
        if media.width * media.height > most:  # a small file can hold many pixels
            what = f"has frames of {media.width} x {media.height} pixels, more than {most} in all"
            hint = "scale them down, or raise max_image_pixels of the dataset"
            raise SourceError(f"{what} (a decompression bomb?)", hint=hint)
        media = media._replace(timing=f"1/16:1x{media.frames}")
    by_time, span = settings.source_fps == "auto", item.span or Span()
    if (by_time or item.window is not None) and not media.timing:
        hint = "give frames in place of seconds, and source_fps as a number"
        raise SourceError("has frames without timestamps", hint=hint)
    if item.window is not None:
        span = _of_seconds(item.window, settings, media, span, rate)
    if span.first >= media.frames:
        what = f"has {media.frames} frames, and its row begins at frame {span.first}"
        raise SourceError(what, hint="correct the row")
    media = media._replace(timing=media.timing if by_time else "")
    if not settings.display_rotation:
        media = media._replace(rotation=0)
    elif media.rotation % 180:
        media = media._replace(width=media.height, height=media.width)
    return media, None if span == Span() else span


def _of_seconds(window: Window, settings: Dataset, media: Media, span: Span, rate: float) -> Span:
    (start, end), timing = window, Timing.parse(media.timing)
    seconds = float(timing.seconds)
    if start >= seconds or (end or 0) > seconds + _GRACE:
        what = f"is {seconds:.2f} s long, and its row names {start:g} to {end or 'the end'}"
        raise SourceError(what, hint="correct the row")
    first = timing.index_at(start)
    if end is None:
        return span._replace(first=first)
    rest = Span(first, None, span.stride)
    kept = kept_indices(timing.index_at(end), settings.source_fps, rest, media.timing, rate)
    return span._replace(first=first, frames=len(kept))


def _refuse_parts(item: Item) -> None:
    """Raise a SourceError for a row that musubi-tuner's own scripts cannot read."""
    if item.is_array:
        what = "is no video, and musubi-tuner's own scripts read videos alone"
        raise SourceError(what, hint="name a video")
    if item.window is not None or item.span not in (None, Span()):
        what = "is used in part, and musubi-tuner's own scripts read videos from their first frame"
        hint = "take `frames`, `start` and the like out of its row, or cut the video"
        raise SourceError(what, hint=hint)


_SHORT = "has too few frames for any clip of target_frames"
_ROTATED = "has a rotation for display, which does not count; set `display_rotation: true`"


def measured(
    layout: Layout,
    settings: Dataset,
    scan: Scan,
    items: Sequence[Item],
    control: Scan,
    memo: Memo,
    model: Model,
) -> tuple[list[Item], list[Fault], list[str]]:
    """Return items with their size, length, span and controls.

    Args:
        layout: layout of the caches.
        settings: the dataset's section of the configuration.
        scan: listing of the dataset.
        items: items without these.
        control: listing of the dataset's `control_directory`; empty without one.
        memo: index with the sizes of known files; it gets new ones.
        model: model whose architecture limits the number of controls, if the layout numbers them.

    Returns:
        The items, the faults of others, and notes for the user about items that are left out.
    """
    complete, owners = list[Item](), dict[str, Item]()
    faults = [*lost_controls(settings, control)]
    notes: dict[str, dict[str, None]] = {}  # note -> names of items, in order
    sizes = probed([item.files[0] for item in items], memo, video=settings.video)
    controls = controls_of(layout, settings, scan, control, items, model)

    for item in _with_unique_names(items, layout):
        try:
            media, span = sizes[item.image], item.span
            if isinstance(media, SourceError):
                raise media
            if settings.video:
                if model.scripted:
                    _refuse_parts(item)
                if media.rotation and not settings.display_rotation:
                    notes.setdefault(_ROTATED, {})[item.image] = None
                media, span = used_part(item, settings, media, layout.rate)
            _check_name(layout, item, owners, settings.text_variants)
            if settings.video and not layout.clips(media, settings, span):
                if span is not None and span.single:
                    every = f" (every {span.stride})" if span.stride > 1 else ""
                    what = f"names {span.frames} frames from frame {span.first} on{every}"
                    what += f", but the video has {media.frames}"
                    raise SourceError(what, hint="correct the row, or take it out")
                if settings.short_videos == "error":
                    raise SourceError(_SHORT, hint="use shorter clips, or remove it")
                notes.setdefault(f"{_SHORT}: it is left out", {})[item.where] = None
                continue
            files = controls(item)
            control_sizes = _control_sizes(files, settings, model, memo)
        except SourceError as error:
            faults.append(fault_of(item, error))
            continue
        if files:
            rest = [file for file in item.files if file.role != LAYER]
            layers = [file for file in item.files if file.role == LAYER]
            item = item._replace(files=(*rest, *files, *layers), control_sizes=control_sizes)
        complete.append(item._replace(media=media, span=span))
    if settings.multiple_target:
        complete = [*_with_usual_layers(complete, faults)]
    lines = []
    for note, names in notes.items():
        more = f", and {len(names) - 1} more" if len(names) > 1 else ""
        lines.append(f"{min(names)} {note}{more}")
    return complete, faults, lines


def _with_unique_names(items: Sequence[Item], layout: Layout) -> Sequence[Item]:
    """Return the items, sorted; add folders to the stems of items that would share a cache name.

    Lists of videos name their items in the same way. All other items keep their stems, and so
    their caches.
    """
    names, stems = Counter(layout.base(item.stem) for item in items), {item.stem for item in items}
    if len(names) == len(stems):
        return items

    def name(stem: str) -> str:
        longer = stem.replace("/", "_")
        return stem if names[layout.base(stem)] == 1 or longer in stems else longer

    return sorted(item._replace(stem=name(item.stem)) for item in items)


def _with_usual_layers(items: Sequence[Item], faults: list[Fault]) -> Iterator[Item]:
    """Yield the items with the usual number of layers, and add faults for the others."""
    counts = Counter(len(item.layers) for item in items if item.layers)
    usual = max(counts, key=lambda count: (counts[count], count), default=0)
    for item in items:
        if (count := len(item.layers)) == usual != 0:
            yield item
            continue
        what = f"has {count or 'no'} {'layer' if count == 1 else 'layers'}"
        if usual > 0:
            what += f", and others {usual}"
        name = item.stem.rpartition("/")[2]
        hint = f"name them {name}_1, {name}_2 and so on, without captions, or remove it"
        faults.append(fault_of(item, SourceError(what, hint=hint)))


def _control_sizes(
    files: Sequence[File], settings: Dataset, model: Model, memo: Memo
) -> tuple[Size, ...]:
    """Return the sizes of an item's controls, or () if their scaling does not depend on them.

    Args:
        files: controls of the item.
        settings: the dataset's section of the configuration.
        model: model of the caches.
        memo: see `probed`.

    Raises:
        SourceError: a control cannot be read, or has a size that the model cannot take.
    """
    has_sizes = settings.no_resize_control or settings.control_resolution
    if settings.video or not files or not has_sizes:
        return ()
    sizes: list[Size] = []
    step = model.spec.side
    cut = 7 if model.spec.encoder_files("latents") else 0  # pixels that a VAE may ignore
    media_of = probed(files, memo, video=False)
    for _, path, _ in files:
        try:
            if isinstance(media := media_of[path], SourceError):
                raise media
            sizes.append(Size(media.width, media.height))
            refuse_odd(control_size(sizes[-1], settings, step), step, cut)
        except SourceError as error:
            what = f"has a control {path}, which {error.what}"
            raise SourceError(what, hint=error.hint) from None
    return tuple(sizes)


# -- files ----------------------------------------------------------------------------------------


def probed(files: Sequence[File], memo: Memo, *, video: bool) -> Mapping[str, Media | SourceError]:
    """Return path -> size and length of files, and store new ones in the memo."""
    stats = {file.path: file.stat for file in files}
    results: dict[str, Media | SourceError] = {**memo.media(stats)}
    new = [path for path in stats if path not in results]
    probes, unit = (probe_videos(new), "video") if video else (map(_image, new), "image")
    pairs = zip(new, probes, strict=True)
    bar = Progress(pairs, total=len(new), desc=f"sizes of {unit}s", unit=unit, disable=not new)
    for path, media in bar:
        results[path] = media
        if not isinstance(media, SourceError):
            memo.learn_media(path, stats[path], media)
    return results


def sizes_of(items: Iterable[Item], memo: Memo) -> dict[str, Size]:
    """Return stem -> size of the image or video of items, as far as it is known or can be read.

    At most `LOOKED_AT` headers are read.
    """
    sizes, unread = dict[str, Size](), list[Item]()
    for item in items:
        if item.media is None:
            unread.append(item)
        else:
            sizes[item.stem] = Size(item.media.width, item.media.height)
    sample = unread[:: -(-len(unread) // LOOKED_AT) or 1]
    files = {item.stem: item.files[0] for item in sample if item.files and not item.is_remote}
    results = probed([*files.values()], memo, video=False)
    for stem, file in files.items():
        media = results[file.path]
        if not isinstance(media, SourceError):
            sizes[stem] = Size(media.width, media.height)
    return sizes


def _image(path: str) -> Media | SourceError:
    try:
        return probe_image(path)
    except SourceError as error:
        return error


def _check_name(layout: Layout, item: Item, owners: dict[str, Item], texts: int) -> None:
    """Raise a SourceError if cache names of an item are too long or equal those of another item.

    Args:
        layout: layout of the caches.
        item: item to check.
        owners: cache name -> item that has it; it gets the names of this item.
        texts: number of texts of an item; in a flat layout further texts have names of their own.
    """
    base, name = layout.base(item.stem), item.stem.rpartition("/")[2]
    endings = ["", *(f".v{number}" for number in range(1, texts) if layout.flat)]
    for ending in endings:
        if (other := owners.setdefault(base + ending, item)) is not item:
            what = f"shares the name {base}{ending} in the cache with {other.image}"
            raise SourceError(what, hint="rename one of them")
    if len(f"{name}{layout.longest_ending}{endings[-1]}".encode()) > 255:
        raise SourceError("has a name too long for its cache file", hint="rename it")
