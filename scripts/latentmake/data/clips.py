"""Clips of a dataset's videos: which frames of which file, and their prompt.

`probe` asks which part of a video an item uses. Readers that encode nothing list the clips of
items: `latentmake.ClipDataset` and `clips_{run}`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

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
from latentmake.layouts.layout import Layout

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


class ListedClip(NamedTuple):
    """One clip of a video, by its place among the frames that are kept."""

    item: Item
    clip: Clip

    @property
    def media(self) -> Media:
        """Size and length of the video."""
        assert self.item.media is not None
        return self.item.media

    @property
    def span(self) -> Span:
        """The part of the video that clips are counted in."""
        return self.item.span or Span()

    def indices(self, source_fps: SourceFps, rate: float = WAN_FPS) -> list[int]:
        """Return the indices of its frames in the file."""
        media = self.media
        kept = kept_indices(media.frames, source_fps, self.span, media.timing, rate)
        return [index for index, _ in kept[self.clip.start : self.clip.start + self.clip.frames]]

    def prompt(self) -> str:
        """Return its prompt, of several texts the first; its caption file may have to be read."""
        if self.item.texts is not None:
            return self.item.texts[0]
        return read_caption(self.item.caption) if self.item.caption else ""


def listed_clips(items: Sequence[Item], layout: Layout, settings: Dataset) -> Iterator[ListedClip]:
    """Yield the clips of a dataset's items, which are measured."""
    for item in items:
        assert item.media is not None
        for clip in layout.clips(item.media, settings, item.span):
            yield ListedClip(item, clip)
