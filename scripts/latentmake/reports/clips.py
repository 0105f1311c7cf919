"""Clips in a page: embedded where they are few, else beside it."""

from __future__ import annotations

import base64
import os
from pathlib import Path
from urllib.parse import quote

from latentmake.errors import SourceError
from latentmake.files.readers import probe_videos
from latentmake.geometry.clips import Media

FPS = 16.0
"""Frames a second of Wan's clips."""

EMBEDDED = 40_000_000
"""Bytes of all clips of a page up to which they are embedded, so that the page can be moved."""


class ClipSources:
    """Addresses of clips for a page's `video` elements.

    Args:
        page: path of the page.
        paths: all clips of the page.

    """

    def __init__(self, page: Path, paths: list[Path]) -> None:
        self._folder = page.parent
        self._paths = dict.fromkeys(paths)
        self._media: dict[Path, Media | SourceError] = {}
        self.embeds = sum(map(_size, self._paths)) <= EMBEDDED

    def __contains__(self, path: Path) -> bool:
        return path in self._paths

    def media(self, path: Path) -> Media:
        """Return the size of a clip.

        Raises:
            SourceError: it is damaged or no video.
        """
        if not self._media:
            names = [str(each) for each in self._paths]
            self._media = dict(zip(self._paths, probe_videos(names), strict=True))
        found = self._media[path]
        if isinstance(found, SourceError):
            raise found
        return found

    def address(self, path: Path) -> str:
        """Return a data URI, or the path from the page to the clip.

        Raises:
            OSError: the clip cannot be read.
        """
        if self.embeds:
            kind = path.suffix.lower().removeprefix(".")
            return f"data:video/{kind};base64,{base64.b64encode(path.read_bytes()).decode()}"
        return quote(Path(os.path.relpath(path, self._folder)).as_posix())


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0  # whoever asks for its address is told
