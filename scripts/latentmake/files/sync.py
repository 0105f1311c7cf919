"""Sync a folder with a list of files: copy what changed, delete what was put there and is gone.

A record in the folder remembers what was copied from where, so that a second sync reads neither
side again, and nothing is removed that somebody else put there. Neither rsync nor fsspec's
`generic.rsync` keeps such a record.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from stat import S_ISREG
from typing import Any, NamedTuple

from latentmake import digest
from latentmake.errors import SourceError, StorageError, storage_error
from latentmake.files import atomic

RECORD = ".latentmake-published.json"

_Record = dict[str, list[Any]]
"""Name of a file -> path, size, mtime_ns, ctime_ns and inode of its source; size and mtime_ns of
its copy. None for a source that is no file, and for a copy that is not finished."""


class Changes(NamedTuple):
    """Numbers of files."""

    copied: int
    linked: int
    unchanged: int
    removed: int


def sync(
    folder: Path,
    files: Mapping[str, Path | bytes],
    *,
    progress: Iterable[str] | None = None,
    link: bool = False,
    replacing: Callable[[str], None] | None = None,
) -> Changes:
    """Make a folder hold these files, besides those of others.

    A file whose record still fits is not read; any other is compared by content. Copies of one
    source under one base name are hard links to one copy, where the file system has them.

    Args:
        folder: made where it is missing.
        files: path below the folder, with forward slashes -> a file to copy, or the content itself.
        progress: the keys of `files`, as something that shows how far it has been read.
        link: hard-link files rather than copy them, where the file system can.
        replacing: called with a name before it is removed or gets other content.

    Raises:
        StorageError: the folder cannot be written; finished work is kept.
        SourceError: a file to copy cannot be read.
    """
    old = _read_record(folder / RECORD)
    record = {name: old.get(name, [None, None]) for name in files}
    work = _Sync(folder, link, replacing or (lambda name: None), record)
    done: Counter[str] = Counter()
    try:
        for place in {(folder / name).parent for name in (RECORD, *files)}:
            for left in place.glob(f".*{atomic.TEMPORARY_SUFFIX}"):
                left.unlink()  # of a sync that was killed
        # Before anything is copied: a name that changed in upper and lower case alone is the same
        # file where case does not count.
        for name in sorted(old.keys() - files.keys()):
            work.remove(name)
            done["removed"] += 1
        if files.keys() - old.keys():
            work.write_record()
        try:
            for name in files if progress is None else progress:
                done[work.bring(name, files[name])] += 1
        finally:
            with contextlib.suppress(StorageError, OSError):  # the first fault is the one to tell
                work.write_record()
    except OSError as error:
        where = error.filename2 or error.filename or folder
        raise storage_error(error, where) or StorageError(
            f"cannot be written ({error.strerror})",
            where=where,
            hint="correct `publish.path`, or mount it for writing, and run the same command again",
        ) from None
    return Changes(*(done[name] for name in Changes._fields))


def recorded(folder: Path) -> set[str]:
    """Return the files that syncs put into a folder, by their paths below it."""
    return set(_read_record(folder / RECORD))


@dataclass
class _Sync:
    """State of one sync."""

    folder: Path
    link: bool
    replacing: Callable[[str], None]
    record: _Record
    # Stamp and base name of a source -> its first copy.
    copies: dict[tuple[Any, ...], Path] = field(default_factory=dict)

    def remove(self, name: str) -> None:
        path = self.folder / name
        self.replacing(name)
        path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # it is not empty
            for parent in path.relative_to(self.folder).parents[:-1]:
                (self.folder / parent).rmdir()

    def bring(self, name: str, source: Path | bytes) -> str:
        """Make a file what it should be, and return what was done: a field of `Changes`."""
        path, stamp = self.folder / name, None
        if isinstance(source, bytes):
            done = self._write(name, path, source)
        else:
            with _reading(source):
                stat = source.stat()
            done = _linked(path, source, stat) if self.link else ""
            if not done:
                times = stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino
                stamp = [os.fspath(source), *times]
                done = self._copy(name, path, source, stamp)
        self.record[name] = [stamp, _size_and_time(path)]
        return done

    def _write(self, name: str, path: Path, data: bytes) -> str:
        there = _size_and_time(path)
        if there is not None and there[0] == len(data) and path.read_bytes() == data:
            return "unchanged"
        self.replacing(name)
        atomic.write(path, data)
        return "copied"

    def _copy(self, name: str, path: Path, source: Path, stamp: list[Any]) -> str:
        there = _size_and_time(path)
        copy = self.copies.setdefault((*stamp[1:], path.name), path)
        if there is not None and self.record[name] == [stamp, there]:
            return "unchanged"
        if there is not None and there[0] == stamp[1]:
            with _reading(source):
                wanted = digest.of_file(source)
            if digest.of_file(path) == wanted:
                return "unchanged"
        self.replacing(name)
        if copy != path and _link(copy, path):
            return "linked"
        with _reading(source):
            file = source.open("rb")
        with file, atomic.replacing(path) as temporary, temporary.open("wb") as new:
            shutil.copyfileobj(file, new)
        return "copied"

    def write_record(self) -> None:
        lines = (f"{json.dumps(x)}: {json.dumps(self.record[x])}" for x in sorted(self.record))
        data = ('{"files": {\n' + ",\n".join(lines) + "\n}}\n").encode()
        path = self.folder / RECORD
        if not path.is_file() or path.read_bytes() != data:
            atomic.write(path, data)


def _linked(path: Path, source: Path, stat: os.stat_result) -> str:
    """Make a name one of the source's own; return "" where the file system cannot."""
    if os.path.lexists(path) and os.path.samestat(path.lstat(), stat):
        return "unchanged"
    return "linked" if _link(source, path) else ""


def _link(existing: Path, path: Path) -> bool:
    """Give a file a second name; return False where the file system cannot."""
    with contextlib.suppress(OSError, StorageError):  # the copy made instead meets it too
        with atomic.replacing(path) as temporary:
            os.link(existing, temporary)
        return True
    return False


def _size_and_time(path: Path) -> list[int] | None:
    """Return size and mtime_ns of a plain file; None of anything else."""
    if not os.path.lexists(path) or not S_ISREG((stat := path.lstat()).st_mode):
        return None
    return [stat.st_size, stat.st_mtime_ns]


@contextlib.contextmanager
def _reading(source: Path) -> Iterator[None]:
    """Tell faults of a source from those of the folder."""
    try:
        yield
    except OSError as error:
        raise SourceError(
            f"cannot be read ({error.strerror})",
            where=source,
            hint="run the same command again, which looks at everything anew",
        ) from None


def _read_record(path: Path) -> _Record:
    """Read the record; one that is missing or damaged remembers nothing."""
    try:
        files = json.loads(path.read_bytes())["files"]
        names = {name: PurePosixPath(name) for name in files}
        # Earlier releases wrote a digest too.
        return {
            name: files[name][:2]
            for name, place in names.items()
            if place.parts and not place.is_absolute() and ".." not in place.parts
        }
    except (OSError, ValueError, TypeError, LookupError, AttributeError):
        return {}
