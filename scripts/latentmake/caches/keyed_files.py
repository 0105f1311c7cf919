"""Cache files by their key: whether one holds it, links to it."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from latentmake.errors import CacheError
from latentmake.files import atomic, cachefile


def has_files(folder: Path) -> bool:
    """Whether anything lies in a folder."""
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        return any(True for _ in entries)
    return False


def holds(path: Path, key: str) -> bool:
    """Whether a cache file exists, is sound and has a key."""
    try:
        return cachefile.read_header(path).key == key
    except (CacheError, OSError):
        return False  # missing, or cut short by a power failure


def link_of_key(existing: Path, path: Path, key: str) -> bool:
    """Link the file of a key to a further name; return False if it is gone or replaced."""
    # Files of spool and store are never replaced; another job may have replaced a cache file.
    if existing.parts[0] == path.parts[0] and not holds(existing, key):
        return False
    try:
        atomic.link(existing, path)
    except FileNotFoundError:
        return False
    return True
