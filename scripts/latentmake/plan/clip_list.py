"""Clips of a dataset's videos, virtual: which frames of which file, and their prompt.

For what reads clips without encoding them: `latentmake.ClipDataset` and `clips_{run}`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from latentmake.config import Dataset
from latentmake.files.media import Media
from latentmake.geometry.clips import Clip, kept_indices
from latentmake.layouts import Layout
from latentmake.sources.items import Item

__all__ = ["ListedClip", "listed_clips"]


class ListedClip(NamedTuple):
    """One clip of a video.

    Attributes:
        path: of the video.
        media: its size and length.
        clip: place and length, among the frames kept.
        caption: path of its caption file; None where `text` replaces it, or for the empty caption.
        text: its prompt, where that is not the content of a caption file.
    """

    stem: str
    path: str
    media: Media
    clip: Clip
    caption: str | None = None
    text: str | None = None

    def indices(self, source_fps: float | None) -> list[int]:
        """Return the indices of its frames in the file."""
        kept = kept_indices(self.media.frames, source_fps)
        return [index for index, _ in kept[self.clip.start : self.clip.start + self.clip.frames]]


def listed_clips(items: Sequence[Item], layout: Layout, settings: Dataset) -> Iterator[ListedClip]:
    """Yield the clips of a dataset's items, which are measured; of several texts the first."""
    for item in items:
        assert item.media is not None
        text = None if item.texts is None else item.texts[0]
        for clip in layout.clips(item.media, settings):
            yield ListedClip(item.stem, item.image, item.media, clip, item.caption, text)
