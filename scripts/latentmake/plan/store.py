"""The store: cache files that builds replaced or removed, by key, up to a limit in bytes.

An edit or setting that is taken back, an item that returns: each finds here what was encoded
before. Anything in the folder, and all of it, can be deleted at any time.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from latentmake.files.atomic import TEMPORARY_SUFFIX

STORE = Path(".latentmake/store")


class _Entry(NamedTuple):
    """A file of the store.

    Attributes:
        since: time it came there (ns): giving a file another name sets its change time.
        size: bytes that deleting it frees; 0 where the file has another name.
    """

    since: int
    path: str
    size: int


def stored(key: str) -> Path:
    """Return the path of a key's file."""
    return STORE / key


def keys() -> set[str]:
    """Return the keys of all files."""
    with contextlib.suppress(OSError):
        return set(os.listdir(STORE))  # noqa: PTH208 -- no paths are made of many thousand names
    return set()


def put_away(path: Path, key: str) -> None:
    """Move a cache file into the store; where it cannot be, delete it."""
    with contextlib.suppress(OSError):
        STORE.mkdir(parents=True, exist_ok=True)
        path.replace(stored(key))
    path.unlink(missing_ok=True)  # renaming does nothing between two names of one file


def _entries() -> Iterator[_Entry]:
    with contextlib.suppress(OSError), os.scandir(STORE) as found:
        for entry in found:
            with contextlib.suppress(OSError):
                stat = entry.stat(follow_symlinks=False)
                alone = stat.st_nlink == 1 and not entry.name.endswith(TEMPORARY_SUFFIX)
                yield _Entry(stat.st_ctime_ns, entry.path, stat.st_size if alone else 0)


def used() -> int:
    """Return the size of the store in bytes."""
    return sum(entry.size for entry in _entries())


def forget_taken(paths: Iterable[str]) -> None:
    """Delete those files of the store that got a name in the cache."""
    for path in paths:
        if path.startswith(f"{STORE}/"):
            with contextlib.suppress(OSError):
                if os.lstat(path).st_nlink > 1:
                    Path(path).unlink()


def prune(limit: int) -> None:
    """Delete the oldest files until the store takes `limit` bytes at most; 0 empties it."""
    entries = sorted(_entries())
    excess = sum(entry.size for entry in entries) - limit
    for entry in entries:
        if limit and excess <= 0:
            break
        with contextlib.suppress(OSError):  # a folder that somebody put there
            if entry.size or not limit:
                Path(entry.path).unlink()
                excess -= entry.size
