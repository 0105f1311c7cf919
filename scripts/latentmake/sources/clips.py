"""Clips of a dataset's videos: which frames of which file, and their prompt.

For readers of clips that encode nothing: `latentmake.ClipDataset` and `clips_{run}`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from latentmake.config.datasets import Dataset
from latentmake.geometry.clips import WAN_FPS, Clip, Media, SourceFps, Span, kept_indices
from latentmake.layouts import Layout
from latentmake.sources.caption_files import read_caption
from latentmake.sources.item import Item


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
