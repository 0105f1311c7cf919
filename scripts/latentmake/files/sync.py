"""Sync a folder with a list of files: copy what changed, delete what was put there and is gone.

A record in the folder remembers what was copied from where, so that a second sync reads neither
side again, and nothing is removed that somebody else put there. Neither rsync nor fsspec's
`generic.rsync` keeps such a record.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
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
_PIECE = 1 << 20  # bytes copied at a time


class Changes(NamedTuple):
    """Numbers of files."""

    copied: int
    linked: int
    unchanged: int
    removed: int


class _Entry(NamedTuple):
    """Record of one file.

    Attributes:
        source: path, size, mtime_ns, ctime_ns and inode of what it was copied from; None of a file
            that was written or linked.
        copy: its own size and mtime_ns; None while it is not known to be finished.
        digest: SHA-256 of its content; "" of a file that was linked.
    """

    source: list[Any] | None = None
    copy: list[int] | None = None
    digest: str = ""


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
    work = _Sync(folder, old, link, replacing or (lambda name: None))
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
            _write_record(folder, {name: old.get(name, _Entry()) for name in files})
        for name in files if progress is None else progress:
            done[work.bring(name, folder / name, files[name])] += 1
    except OSError as error:
        where = error.filename2 or error.filename or folder
        raise storage_error(error, where) or StorageError(
            f"cannot be written ({error.strerror})",
            where=where,
            hint="correct `publish.path`, or mount it for writing, and run the same command again",
        ) from None
    finally:
        if work.record:
            with contextlib.suppress(StorageError, OSError):  # the first fault is the one to tell
                known = {name: old[name] for name in files if name in old}
                _write_record(folder, known | work.record)
    return Changes(*(done[name] for name in Changes._fields))


def recorded(folder: Path) -> set[str]:
    """Return the files that syncs put into a folder, by their paths below it."""
    return set(_read_record(folder / RECORD))


@dataclass
class _Sync:
    """State of one sync."""

    folder: Path
    old: Mapping[str, _Entry]
    link: bool
    replacing: Callable[[str], None]
    record: dict[str, _Entry] = field(default_factory=dict)
    # (device, inode, base name) of a source -> its copy, and the digest of both.
    copies: dict[tuple[int, int, str], tuple[Path, str]] = field(default_factory=dict)

    def remove(self, name: str) -> None:
        path = self.folder / name
        self.replacing(name)
        path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # it is not empty
            for parent in path.relative_to(self.folder).parents[:-1]:
                (self.folder / parent).rmdir()

    def bring(self, name: str, path: Path, source: Path | bytes) -> str:
        """Make a file what it should be, and return what was done: a field of `Changes`."""
        if isinstance(source, bytes):
            return self._write(name, path, source)
        with _reading(source):
            stat = source.stat()
        return (self.link and self._link(name, path, source, stat)) or self._copy(
            name, path, source, stat
        )

    def _write(self, name: str, path: Path, data: bytes) -> str:
        there, done = _size_and_time(path), "unchanged"
        if there is None or there[0] != len(data) or path.read_bytes() != data:
            self.replacing(name)
            atomic.write(path, data)
            done = "copied"
        self.record[name] = _Entry(None, _size_and_time(path), digest.of_bytes(data))
        return done

    def _link(self, name: str, path: Path, source: Path, stat: os.stat_result) -> str | None:
        """Make a name one of the source's own; return None where the file system cannot."""
        there, done = _lstat(path), "unchanged"
        if there is None or not os.path.samestat(there, stat):
            if not _link(source, path):
                return None
            done = "linked"
        self.record[name] = _Entry(None, _size_and_time(path))
        return done

    def _copy(self, name: str, path: Path, source: Path, stat: os.stat_result) -> str:
        times = (stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino)
        stamp = [os.fspath(source), *times]
        key = (stat.st_dev, stat.st_ino, path.name)
        other, other_digest = self.copies.get(key, (None, ""))
        entry, there = self.old.get(name, _Entry()), _size_and_time(path)
        known = entry.digest if there is not None and entry.copy == there else None
        content, done = None, "unchanged"
        if known is not None and entry.source == stamp:
            content = known
        elif there is not None and there[0] == stat.st_size:
            with _reading(source):
                wanted = other_digest or digest.of_file(source)
            if wanted == (digest.of_file(path) if known is None else known):
                content = wanted
        if content is None:
            self.replacing(name)
            if other is not None and _link(other, path):
                content, done = other_digest, "linked"
            else:
                content, done = _copy(source, path), "copied"
        self.copies.setdefault(key, (path, content))
        self.record[name] = _Entry(stamp, _size_and_time(path), content)
        return done


def _lstat(path: Path) -> os.stat_result | None:
    try:
        return path.lstat()
    except FileNotFoundError:
        return None


def _size_and_time(path: Path) -> list[int] | None:
    """Return size and mtime_ns of a plain file; None of anything else."""
    stat = _lstat(path)
    if stat is None or not S_ISREG(stat.st_mode):
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


def _copy(source: Path, path: Path) -> str:
    """Copy a file, and return the digest of what was copied."""
    seen = hashlib.sha256()
    with _reading(source):
        file = source.open("rb")
    with (
        file,
        atomic.replacing(path, one_writer=True) as temporary,
        temporary.open("wb") as copy,
    ):
        piece = b"-"
        while piece:
            with _reading(source):
                piece = file.read(_PIECE)
            seen.update(piece)
            copy.write(piece)
    return seen.hexdigest()


def _link(existing: Path, path: Path) -> bool:
    """Give a file a second name; return False where the file system cannot."""
    with contextlib.suppress(OSError, StorageError):  # the copy made instead meets it too
        with atomic.replacing(path, one_writer=True) as temporary:
            os.link(existing, temporary)
        return True
    return False


def _read_record(path: Path) -> dict[str, _Entry]:
    """Read the record; one that is missing or damaged remembers nothing."""
    try:
        files = json.loads(path.read_bytes())["files"]
        return {
            name: _Entry(source, copy, content)
            for name, (source, copy, content) in files.items()
            if _is_inside(PurePosixPath(name))
        }
    except (OSError, ValueError, TypeError, LookupError, AttributeError):
        return {}


def _is_inside(path: PurePosixPath) -> bool:
    return not path.is_absolute() and ".." not in path.parts and len(path.parts) > 0


def _write_record(folder: Path, record: Mapping[str, _Entry]) -> None:
    lines = (f"{json.dumps(name)}: {json.dumps(record[name])}" for name in sorted(record))
    data = ('{"files": {\n' + ",\n".join(lines) + "\n}}\n").encode()
    path = folder / RECORD
    with contextlib.suppress(OSError):
        if path.read_bytes() == data:
            return
    atomic.write(path, data)
