"""Clips of a dataset's videos, virtual: which frames of which file, and their prompt.

For what reads clips without encoding them: `latentmake.ClipDataset` and `clips_{run}`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from latentmake.config.datasets import Dataset
from latentmake.files.media import Media
from latentmake.geometry.clips import WAN_FPS, Clip, SourceFps, Span, kept_indices
from latentmake.index.memo import SourceStat
from latentmake.layouts import Layout
from latentmake.sources.items import Item


class ListedClip(NamedTuple):
    """One clip of a video.

    Attributes:
        path: of the video.
        stat: its stat when it was listed.
        media: its size and length.
        span: the part of it that clips are counted in.
        clip: place and length, among the frames kept of the span.
        caption: path of its caption file; None where `text` replaces it, or for the empty caption.
        text: its prompt, where that is not the content of a caption file.
        row: further columns of its row in a list.
    """

    stem: str
    path: str
    stat: SourceStat
    media: Media
    span: Span
    clip: Clip
    caption: str | None = None
    text: str | None = None
    row: dict[str, Any] | None = None

    def indices(self, source_fps: SourceFps, rate: float = WAN_FPS) -> list[int]:
        """Return the indices of its frames in the file."""
        media = self.media
        kept = kept_indices(media.frames, source_fps, self.span, media.timing, rate)
        return [index for index, _ in kept[self.clip.start : self.clip.start + self.clip.frames]]


def listed_clips(items: Sequence[Item], layout: Layout, settings: Dataset) -> Iterator[ListedClip]:
    """Yield the clips of a dataset's items, which are measured; of several texts the first."""
    for item in items:
        assert item.media is not None
        text = None if item.texts is None else item.texts[0]
        for clip in layout.clips(item.media, settings, item.span):
            yield ListedClip(
                item.stem,
                item.image,
                item.image_stat,
                item.media,
                item.span or Span(),
                clip,
                item.caption,
                text,
                item.row,
            )
