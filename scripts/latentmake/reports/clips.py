"""Clips in a page: embedded where they are few, else beside it."""

from __future__ import annotations

import base64
import os
from pathlib import Path
from urllib.parse import quote

__all__ = ["EMBEDDED", "ClipSources"]

EMBEDDED = 40_000_000
"""Bytes of all clips of a page up to which they are embedded, so that the page can be moved."""


class ClipSources:
    """Addresses of clips for a page's `video` elements.

    Args:
        page: path of the page.
        paths: all clips of the page.

    Raises:
        OSError: a clip cannot be read.
    """

    def __init__(self, page: Path, paths: list[Path]) -> None:
        self._folder = page.parent
        self.embeds = sum(path.stat().st_size for path in set(paths)) <= EMBEDDED

    def address(self, path: Path) -> str:
        """Return a data URI, or the path from the page to the clip."""
        if self.embeds:
            return f"data:video/mp4;base64,{base64.b64encode(path.read_bytes()).decode()}"
        return quote(Path(os.path.relpath(path, self._folder)).as_posix())
