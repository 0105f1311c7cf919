"""Clips of a dataset's videos: which frames of which file, and their prompt.

`probe` asks which part of a video an item uses; `latentmake.ClipDataset` and `clips_{run}`, which
encode nothing, ask for the frames of each clip.
"""

from __future__ import annotations

from latentmake.config.datasets import Dataset
from latentmake.data.item import Item, Window
from latentmake.data.texts import read_caption
from latentmake.errors import SourceError
from latentmake.files.media import NPZ
from latentmake.geometry.clips import (
    WAN_FPS,
    Clip,
    Media,
    SourceFps,
    Span,
    Timing,
    kept_indices,
)

_GRACE = 0.1  # seconds by which a row may end after its video


def used_part(
    item: Item, settings: Dataset, media: Media, rate: float
) -> tuple[Media, Span | None]:
    """Return what of a video's size and timing counts, and the frames of it that an item uses.

    Raises:
        SourceError: timestamps are needed and not known, or the span begins or ends behind the
            video; or the frames of an array are larger than any image may be.
    """
    if item.image.lower().endswith(NPZ):
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
    """Return the span of a row that is given in seconds."""
    (start, end), timing = window, Timing.parse(media.timing)
    seconds = float(timing.seconds)
    if start >= seconds or (end or 0) > seconds + _GRACE:
        what = f"is {seconds:.2f} s long, and its row names {start:g} to {end or 'the end'}"
        raise SourceError(what, hint="correct the row")
    first = timing.index_at(start)
    if end is None:
        return span._replace(first=first)
    whole = Span(first, None, span.stride)
    kept = kept_indices(timing.index_at(end), settings.source_fps, whole, media.timing, rate)
    return span._replace(first=first, frames=len(kept))


def refuse_parts(item: Item) -> None:
    """Refuse a row that musubi-tuner's own scripts cannot be given: a part of a video, or arrays.

    Raises:
        SourceError: it is one.
    """
    if item.image.lower().endswith(NPZ):
        what = "is no video, and musubi-tuner's own scripts read videos alone"
        raise SourceError(what, hint="name a video")
    if item.window is not None or item.span not in (None, Span()):
        what = "is used in part, and musubi-tuner's own scripts read videos from their first frame"
        hint = "take `frames`, `start` and the like out of its row, or cut the video"
        raise SourceError(what, hint=hint)


def refuse_beyond(media: Media, span: Span | None) -> None:
    """Refuse a row that is one clip with frames behind the end of its video."""
    if span is not None and span.single:
        every = f" (every {span.stride})" if span.stride > 1 else ""
        what = f"names {span.frames} frames from frame {span.first} on{every}"
        hint = "correct the row, or take it out"
        raise SourceError(f"{what}, but the video has {media.frames}", hint=hint)


def indices_of(item: Item, clip: Clip, source_fps: SourceFps, rate: float = WAN_FPS) -> list[int]:
    """Return the indices in its file of the frames of a clip, which is cut from an item."""
    assert item.media is not None
    frames, timing = item.media.frames, item.media.timing
    kept = kept_indices(frames, source_fps, item.span or Span(), timing, rate)
    return [index for index, _ in kept[clip.start : clip.start + clip.frames]]


def prompt_of(item: Item) -> str:
    """Return an item's prompt, of several texts the first; its caption file may have to be read."""
    if item.texts is not None:
        return item.texts[0]
    return read_caption(item.caption) if item.caption else ""
