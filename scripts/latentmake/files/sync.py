"""A folder that is kept like a list of files: what changed is brought, what is gone is removed.

A record in the folder remembers what was put there from what, so that a second time neither side
is read again, and nothing is removed that somebody else put there.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path, PurePosixPath
from stat import S_ISREG
from typing import Any, NamedTuple

from latentmake import digest
from latentmake.errors import SourceError, StorageError, storage_error
from latentmake.files import atomic

__all__ = ["RECORD", "Changes", "mirror"]

RECORD = ".latentmake-published.json"
_PIECE = 1 << 20


class Changes(NamedTuple):
    """How many files were written, linked, left as they were, and removed."""

    copied: int
    linked: int
    unchanged: int
    removed: int


class _Entry(NamedTuple):
    """What is remembered of one file.

    Attributes:
        source: path, size, mtime_ns, ctime_ns and inode of what it was copied from; None of a file
            that was written or linked.
        copy: its own size and mtime_ns; None while it is not known to be finished.
        digest: SHA-256 of its content; "" of a file that was linked.
    """

    source: list[Any] | None
    copy: list[int] | None
    digest: str


_UNFINISHED = _Entry(None, None, "")


def mirror(
    folder: Path,
    files: Mapping[str, Path | bytes],
    *,
    progress: Iterable[str] | None = None,
    link: bool = False,
    replacing: Callable[[str], None] | None = None,
) -> Changes:
    """Make a folder hold these files, besides those of others.

    A file whose record still fits is not read; any other is compared by content. A copy appears
    under its name only when it is whole. Copies of one source under one base name are one file with
    several names, where the file system can do that.

    Args:
        folder: made where it is missing.
        files: path below the folder, with forward slashes -> a file to copy, or the content itself.
        progress: the keys of `files`, as something that shows how far it has been read.
        link: give files a second name there rather than copy them, where the file system can.
        replacing: called with a name before it is removed or gets other content.

    Raises:
        StorageError: the folder cannot be written; finished work is kept.
        SourceError: a file to copy cannot be read.
    """
    old = _read(folder / RECORD)
    work = _Mirror(folder, old, link, replacing or (lambda name: None))
    try:
        gone = sorted(old.keys() - files.keys())
        # Before anything is copied: a name that changed in upper and lower case alone is the same
        # file where case does not count.
        for name in gone:
            work.remove(name)
        if files.keys() - old.keys():
            _write(folder, {name: old.get(name, _UNFINISHED) for name in files})
        for name in files if progress is None else progress:
            work.bring(name, files[name])
    except OSError as error:
        raise _storage(error, error.filename2 or error.filename or folder) from None
    finally:
        if work.record:
            with contextlib.suppress(StorageError, OSError):  # the first fault is the one to tell
                _write(folder, {name: old[name] for name in files if name in old} | work.record)
    return Changes(work.copied, work.linked, work.unchanged, len(gone))


class _Mirror:
    """The state of one call of `mirror`."""

    def __init__(
        self,
        folder: Path,
        old: Mapping[str, _Entry],
        link: bool,
        replacing: Callable[[str], None],
    ) -> None:
        self.folder = folder
        self.old = old
        self.link = link
        self.replacing = replacing
        self.record: dict[str, _Entry] = {}
        self.copied = self.linked = self.unchanged = 0
        # (device, inode, base name) of a source -> its copy, and the digest of both.
        self._twins: dict[tuple[int, int, str], tuple[Path, str]] = {}

    def remove(self, name: str) -> None:
        path = self.folder / name
        self.replacing(name)
        path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # it is not empty
            for parent in path.relative_to(self.folder).parents[:-1]:
                (self.folder / parent).rmdir()

    def bring(self, name: str, source: Path | bytes) -> None:
        if isinstance(source, bytes):
            self._write(name, source)
            return
        try:
            found = source.stat()
        except OSError as error:
            raise _unreadable(source, error) from None
        path = self.folder / name
        stamp = [
            os.fspath(source),
            *(found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino),
        ]
        if self.link and self._linked(name, source, path, found):
            return
        key = (found.st_dev, found.st_ino, path.name)
        twin = self._twins.get(key)
        content = self._present(path, self.old.get(name), source, stamp, twin)
        if content is not None:
            self.unchanged += 1
        else:
            self.replacing(name)
            if twin is not None and _link(twin[0], path):
                content = twin[1]
                self.linked += 1
            else:
                content = _copy(source, path)
                self.copied += 1
        self._twins.setdefault(key, (path, content))
        self.record[name] = _Entry(stamp, _stamp(path), content)

    def _linked(self, name: str, source: Path, path: Path, found: os.stat_result) -> bool:
        """Whether a name is one of the source's own now."""
        if _same_file(path, found):
            self.unchanged += 1
        elif _link(source, path):
            self.linked += 1
        else:
            return False
        self.record[name] = _Entry(None, _stamp(path), "")
        return True

    def _present(
        self,
        path: Path,
        entry: _Entry | None,
        source: Path,
        stamp: list[Any],
        twin: tuple[Path, str] | None,
    ) -> str | None:
        """Return the digest of a copy that is what it should be; None of any other."""
        there = _stamp(path)
        if there is None or there[0] != stamp[1]:
            return None
        known = entry.digest if entry is not None and entry.copy == there else None
        if known is not None and entry is not None and entry.source == stamp:
            return known
        wanted = twin[1] if twin is not None else _digest(source)
        if known is None:
            known = digest.of_file(path)
        return wanted if known == wanted else None

    def _write(self, name: str, data: bytes) -> None:
        path = self.folder / name
        there = _stamp(path)
        if there is not None and there[0] == len(data) and path.read_bytes() == data:
            self.unchanged += 1
        else:
            self.replacing(name)
            atomic.write(path, data)
            self.copied += 1
        self.record[name] = _Entry(None, _stamp(path), digest.of_bytes(data))


def _same_file(path: Path, found: os.stat_result) -> bool:
    try:
        return os.path.samestat(path.lstat(), found)
    except FileNotFoundError:
        return False


def _stamp(path: Path) -> list[int] | None:
    """Return size and mtime_ns of a plain file; None of anything else."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return None
    return [found.st_size, found.st_mtime_ns] if S_ISREG(found.st_mode) else None


def _digest(source: Path) -> str:
    try:
        return digest.of_file(source)
    except OSError as error:
        raise _unreadable(source, error) from None


def _copy(source: Path, path: Path) -> str:
    """Copy a file, and return the digest of what was copied."""
    seen = hashlib.sha256()
    try:
        file = source.open("rb")
    except OSError as error:
        raise _unreadable(source, error) from None
    with (
        file,
        atomic.replacing(path, one_writer=True) as temporary,
        temporary.open("wb") as copy,
    ):
        while piece := _piece(file, source):
            seen.update(piece)
            copy.write(piece)
    return seen.hexdigest()


def _piece(file: Any, source: Path) -> bytes:
    try:
        piece: bytes = file.read(_PIECE)
    except OSError as error:
        raise _unreadable(source, error) from None
    return piece


def _link(existing: Path, path: Path) -> bool:
    """Give a file a second name; return False where the file system cannot."""
    with contextlib.suppress(OSError, StorageError):  # the copy made instead meets it too
        with atomic.replacing(path, one_writer=True) as temporary:
            temporary.unlink(missing_ok=True)
            os.link(existing, temporary)
        return True
    return False


def _unreadable(source: Path, error: OSError) -> SourceError:
    return SourceError(
        f"cannot be read ({error.strerror})",
        where=source,
        mend="give the same command again, which looks at everything anew",
    )


def _storage(error: OSError, where: str | os.PathLike[str]) -> StorageError:
    return storage_error(error, where) or StorageError(
        f"cannot be written ({error.strerror})",
        where=where,
        mend="correct `publish.path`, or mount it for writing, and give the same command again",
    )


def _read(path: Path) -> dict[str, _Entry]:
    """Read the record; one that is missing or damaged remembers nothing."""
    try:
        files = json.loads(path.read_bytes())["files"]
        return {
            name: _Entry(source, copy, content)
            for name, (source, copy, content) in files.items()
            if _inside(name)
        }
    except (OSError, ValueError, TypeError, LookupError, AttributeError):
        return {}


def _inside(name: str) -> bool:
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts and len(path.parts) > 0


def _write(folder: Path, record: Mapping[str, _Entry]) -> None:
    lines = (f"{json.dumps(name)}: {json.dumps(record[name])}" for name in sorted(record))
    data = ('{"files": {\n' + ",\n".join(lines) + "\n}}\n").encode()
    path = folder / RECORD
    with contextlib.suppress(OSError):
        if path.read_bytes() == data:
            return
    atomic.write(path, data)
