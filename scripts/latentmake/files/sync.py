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
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path, PurePosixPath
from stat import S_ISREG
from typing import Any, Literal, NamedTuple

from pydantic import TypeAdapter

from latentmake import digest
from latentmake.errors import SourceError, StorageError
from latentmake.files import atomic
from latentmake.files.state_file import read_state

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
        files: path below the folder, with forward slashes, or an absolute one -> a file to copy,
            or the content itself.
        progress: the keys of `files`, as something that shows how far it has been read.
        link: hard-link files rather than copy them, where the file system can.
        replacing: called with a name before it is removed or gets other content.

    Raises:
        StorageError: the folder cannot be written; finished work is kept.
        SourceError: a file to copy cannot be read.
    """
    tell, old = replacing or (lambda name: None), _read_record(folder / RECORD)
    record = {name: old.get(name, [None, None]) for name in files}
    copies: dict[tuple[Any, ...], Path] = {}  # stamp and base name of a source -> its first copy
    done: Counter[str] = Counter()
    try:
        for place in {(folder / name).parent for name in (RECORD, *files)}:
            for left in place.glob(f".*{atomic.TEMPORARY_SUFFIX}"):
                left.unlink()  # of a sync that was killed
        # Before anything is copied: a name that changed in upper and lower case alone is the same
        # file where case does not count.
        for name in sorted(old.keys() - files.keys()):
            tell(name)
            _remove(folder, name)
            done["removed"] += 1
        if files.keys() - old.keys():
            _write_record(folder, record)
        try:
            for name in files if progress is None else progress:
                path, source = folder / name, files[name]
                stamp, there = _stamp(source), _size_and_time(path)
                if _is_same(path, source, [stamp, there], record[name], link=link):
                    how = "unchanged"
                else:
                    tell(name)
                    copy = copies.get((*stamp[1:], path.name)) if stamp else None
                    how = _bring(path, source, copy, link=link)
                if stamp is not None:
                    copies.setdefault((*stamp[1:], path.name), path)
                done[how] += 1
                if link and stamp is not None and path.samefile(stamp[0]):
                    stamp = None  # which a link changes
                record[name] = [stamp, _size_and_time(path)]
        finally:
            with contextlib.suppress(StorageError, OSError):  # the first fault is the one to tell
                _write_record(folder, record)
    except OSError as error:
        where, what = error.filename or folder, error.strerror
        if where in {str(x) for x in files.values() if isinstance(x, Path)}:
            hint = "run the same command again, which looks at everything anew"
            raise SourceError(f"cannot be read ({what})", where=where, hint=hint) from None
        hint = "correct `publish.path`, or mount it for writing, and run the same command again"
        raise StorageError(f"cannot be written ({what})", where=where, hint=hint) from None
    return Changes(*(done[name] for name in Changes._fields))


def recorded(folder: Path) -> set[str]:
    """Return the files that syncs put into a folder, by their paths below it."""
    return set(_read_record(folder / RECORD))


def _is_same(
    path: Path, source: Path | bytes, now: list[Any], recorded: list[Any], *, link: bool
) -> bool:
    """Whether a file is what it should be; `now` are its stamps, as its record has them."""
    stamp, there = now
    if there is None:
        return False
    if isinstance(source, bytes):
        return bool(there[0] == len(source)) and path.read_bytes() == source
    if link and path.samefile(source):
        return True
    if recorded == now:  # a copy of ours
        return True
    same_size = bool(there[0] == stamp[1])
    return same_size and not link and digest.of_file(source) == digest.of_file(path)


def _bring(path: Path, source: Path | bytes, copy: Path | None, *, link: bool) -> str:
    """Make a file what it should be, and return what was done: a field of `Changes`."""
    if isinstance(source, bytes):
        atomic.write(path, source)
        return "copied"
    for existing in (source if link else None, copy):
        with contextlib.suppress(OSError, StorageError):  # the copy made instead meets it too
            if existing is not None:
                with atomic.replacing(path) as temporary:
                    os.link(existing, temporary)
                return "linked"
    with source.open("rb") as old, atomic.replacing(path) as place, place.open("wb") as new:
        shutil.copyfileobj(old, new)
    return "copied"


def _remove(folder: Path, name: str) -> None:
    """Remove a file, and the folders below `folder` that are empty then."""
    (folder / name).unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # it is not empty
        for parent in PurePosixPath(name).parents[:-1] if not name.startswith("/") else ():
            (folder / parent).rmdir()


def _stamp(source: Path | bytes) -> list[Any] | None:
    if isinstance(source, bytes):
        return None
    return [os.fspath(source), *digest.source_stat(source.stat())]


def _size_and_time(path: Path) -> list[int] | None:
    """Return size and mtime_ns of a plain file; None of anything else."""
    if not os.path.lexists(path) or not S_ISREG((stat := path.lstat()).st_mode):
        return None
    return [stat.st_size, stat.st_mtime_ns]


def _write_record(folder: Path, record: _Record) -> None:
    lines = (f"{json.dumps(x)}: {json.dumps(record[x])}" for x in sorted(record))
    data = ('{"files": {\n' + ",\n".join(lines) + "\n}}\n").encode()
    path = folder / RECORD
    if not path.is_file() or path.read_bytes() != data:
        atomic.write(path, data)


def _read_record(path: Path) -> _Record:
    """Read the record; one that is missing or damaged remembers nothing."""
    found = read_state(path, _RECORDED.validate_json) or {}
    # Earlier releases wrote a digest too.
    return {name: stamps[:2] for name, stamps in found.get("files", {}).items()}


_RECORDED = TypeAdapter(dict[Literal["files"], dict[str, list[Any]]])
