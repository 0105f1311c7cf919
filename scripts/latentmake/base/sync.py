"""Sync of a folder with a list of files: copy changed files, delete files that left the list.

A record in the folder notes which files were copied from where. So a second sync reads neither
sources nor copies, and files of others are never removed. Neither rsync nor fsspec's
`generic.rsync` keeps such a record.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from stat import S_ISREG
from typing import Any, Literal, NamedTuple

from pydantic import TypeAdapter

from latentmake.base import atomic, digest
from latentmake.base.errors import SourceError, StorageError
from latentmake.base.state_file import read_state

RECORD = ".latentmake-published.json"

_Record = dict[str, list[Any]]
"""Name of a file -> [source, copy]. The source is a list of path, size, mtime_ns, ctime_ns and
inode, or None if it is no file. The copy is a list of size and mtime_ns, or None until it is
finished."""


class Changes(NamedTuple):
    """Numbers of files by what a sync did with them."""

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
    """Sync a folder with a list of files. Files of others in the folder stay.

    A file that still matches its record is not read; any other file is compared by content. If a
    source is copied several times under the same base name, the further copies are hard links to
    the first one, if the file system supports them.

    Args:
        folder: folder; created if it is missing.
        files: path below the folder, with forward slashes, or absolute path -> a file to copy, or
            the content itself.
        progress: the keys of `files`, in an iterable that shows the progress.
        link: whether files are hard-linked instead of copied, if the file system supports it.
        replacing: function that gets a name before the file is removed or its content changes.

    Raises:
        StorageError: the folder cannot be written; finished work is kept.
        SourceError: a file to copy cannot be read.
    """
    before_change, old = replacing or (lambda name: None), _read_record(folder / RECORD)
    record = {name: old.get(name, [None, None]) for name in files}
    copies: dict[tuple[Any, ...], Path] = {}  # stamp and base name of a source -> its first copy
    counts: Counter[str] = Counter()
    try:
        for place in {(folder / name).parent for name in (RECORD, *files)}:
            for left in place.glob(f".*{atomic.TEMPORARY_SUFFIX}"):
                left.unlink()  # a killed sync left it
        # Remove before copying: if only the case of a name changed, both names are the same file
        # on a file system that ignores case.
        for name in sorted(old.keys() - files.keys()):
            before_change(name)
            _remove(folder, name)
            counts["removed"] += 1
        # The record lists new files before they exist, so a killed sync leaves no unknown files.
        if files.keys() - old.keys():
            _write_record(folder, record)
        try:
            for name in files if progress is None else progress:
                path, source = folder / name, files[name]
                source_stamp, copy_stamp = _stamp(source), _size_and_time(path)
                if _is_same(path, source, [source_stamp, copy_stamp], record[name], link=link):
                    action = "unchanged"
                else:
                    before_change(name)
                    copy = copies.get((*source_stamp[1:], path.name)) if source_stamp else None
                    action = _bring(path, source, copy, link=link)
                if source_stamp is not None:
                    copies.setdefault((*source_stamp[1:], path.name), path)
                counts[action] += 1
                if link and source_stamp is not None and path.samefile(source_stamp[0]):
                    source_stamp = None  # a hard link changes the ctime of its source
                record[name] = [source_stamp, _size_and_time(path)]
        finally:
            with contextlib.suppress(StorageError, OSError):  # do not hide the first error
                _write_record(folder, record)
    except OSError as error:
        where, what = error.filename or folder, error.strerror
        if where in {str(source) for source in files.values() if isinstance(source, Path)}:
            hint = "run the same command again, which looks at everything anew"
            raise SourceError(f"cannot be read ({what})", where=where, hint=hint) from None
        hint = "correct `publish.path`, or mount it for writing, and run the same command again"
        raise StorageError(f"cannot be written ({what})", where=where, hint=hint) from None
    return Changes(*(counts[name] for name in Changes._fields))


def unsynced(folder: Path, files: Mapping[str, Path | bytes]) -> Iterator[tuple[str, str]]:
    """Yield each file that a sync without links would write or remove, and what is wrong with it.

    Raises:
        OSError: a file cannot be read.
    """
    record = _read_record(folder / RECORD)
    for name, source in files.items():
        path, before = folder / name, record.get(name, [None, None])
        if not path.is_file():
            yield name, "is missing"
        elif not _is_same(path, source, [_stamp(source), _size_and_time(path)], before, link=False):
            yield name, "differs from what it is made of"
    for name in sorted(record.keys() - files.keys()):
        yield name, "belongs to no item any longer"


def recorded(folder: Path) -> set[str]:
    """Return the files that syncs put into a folder, as paths below the folder."""
    return set(_read_record(folder / RECORD))


def _is_same(
    path: Path, source: Path | bytes, now: list[Any], recorded: list[Any], *, link: bool
) -> bool:
    """Whether a file has the content of its source; `now` are present stamps, as in a record."""
    source_stamp, copy_stamp = now
    if copy_stamp is None:
        return False
    if isinstance(source, bytes):
        return bool(copy_stamp[0] == len(source)) and path.read_bytes() == source
    if link and path.samefile(source):
        return True
    if recorded == now:  # our copy, and neither side has changed
        return True
    same_size = bool(copy_stamp[0] == source_stamp[1])
    return same_size and not link and digest.of_file(source) == digest.of_file(path)


def _bring(path: Path, source: Path | bytes, copy: Path | None, *, link: bool) -> str:
    """Write, link or copy a file, and return which of these was done: a field of `Changes`."""
    if isinstance(source, bytes):
        atomic.write(path, source)
        return "copied"
    for existing in (source if link else None, copy):
        # If linking fails, the file is copied. A full disk then fails again, with its error.
        with contextlib.suppress(OSError, StorageError):
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
    if name.startswith("/"):
        return
    with contextlib.suppress(OSError):  # a folder that is not empty stays
        for parent in PurePosixPath(name).parents[:-1]:
            (folder / parent).rmdir()


def _stamp(source: Path | bytes) -> list[Any] | None:
    if isinstance(source, bytes):
        return None
    return [os.fspath(source), *digest.source_stat(source.stat())]


def _size_and_time(path: Path) -> list[int] | None:
    """Return size and mtime_ns of a regular file; None for anything else."""
    if not os.path.lexists(path) or not S_ISREG((stat := path.lstat()).st_mode):
        return None
    return [stat.st_size, stat.st_mtime_ns]


def _write_record(folder: Path, record: _Record) -> None:
    lines = (f"{json.dumps(name)}: {json.dumps(record[name])}" for name in sorted(record))
    data = ('{"files": {\n' + ",\n".join(lines) + "\n}}\n").encode()
    path = folder / RECORD
    if not path.is_file() or path.read_bytes() != data:
        atomic.write(path, data)


def _read_record(path: Path) -> _Record:
    """Read the record; it is empty if the file is missing or damaged."""
    content = read_state(path, _RECORDED.validate_json) or {}
    # Records of earlier releases have a digest, too.
    return {name: stamps[:2] for name, stamps in content.get("files", {}).items()}


_RECORDED = TypeAdapter(dict[Literal["files"], dict[str, list[Any]]])
