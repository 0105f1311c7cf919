"""SHA-256 digests of bytes, files and plain values; and stats, by which unchanged files are told.

SHA-256 throughout, so that `sha256sum` on a source gives the very digest in a cache file's header.
"""

from __future__ import annotations

import errno
import hashlib
import json
import marshal
import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from latentmake.regular import open_regular

_LONG = 4 << 30  # bytes: seconds of reading, which are worth a progress bar


def canonical(value: object) -> str:
    """Return the canonical JSON of a plain value: keys sorted, no spaces, no escapes."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def of_bytes(data: bytes) -> str:
    """Return the SHA-256 of bytes, as 64 hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()


def of_value(value: object) -> str:
    """Return the SHA-256 of a plain value's canonical JSON."""
    return of_bytes(canonical(value).encode())


def of_lines(lines: Iterable[str]) -> str:
    """Return the SHA-256 of lines in the order given."""
    return of_bytes("\n".join(lines).encode("utf-8", "surrogateescape"))


def of_entries(entries: object) -> str:
    """Return the SHA-256 of a listing (tuples of text and whole numbers) in its order.

    A folder's order changes only when the folder does; otherwise nothing but time is lost.
    """
    # Version 2 of the marshal format depends on values alone, not on which objects are shared.
    return of_bytes(marshal.dumps(entries, 2))  # type: ignore[arg-type]


class Section(NamedTuple):
    """A part of a file, which has a digest of its own.

    Attributes:
        path: of the file.
        name: of the part.
        described: plain value that counts besides the bytes, such as names and shapes.
        ranges: of the bytes: first, and one after the last.
    """

    path: Path
    name: str
    described: object
    ranges: tuple[tuple[int, int], ...]

    def __str__(self) -> str:
        """Return its name in the memo."""
        return f"{self.path}#{self.name}"

    def stat(self) -> os.stat_result:
        """Return the stat of the file."""
        return self.path.stat()


def of_file(path: Path | Section, *, quiet: bool = False) -> str:
    """Return the SHA-256 of a file's content; a large one gets a progress bar unless `quiet`.

    Raises:
        OSError: it cannot be read, or is no regular file.
    """
    if isinstance(path, Section):
        return _of_section(path)
    file, size = open_regular(path)
    with file:
        if quiet or size < _LONG:
            return hashlib.file_digest(file, "sha256").hexdigest()
        from latentmake.progress import Progress

        found = hashlib.sha256()
        bar = Progress(total=size, desc=f"reading {path.name}", unit="B", unit_scale=True)
        with bar as progress:
            while data := file.read(1 << 24):
                found.update(data)
                progress.update(len(data))
        return found.hexdigest()


def _of_section(section: Section) -> str:
    found = hashlib.sha256(canonical(section.described).encode())
    file, _ = open_regular(section.path)
    with file:
        for start, end in section.ranges:
            file.seek(start)
            while start < end:
                data = file.read(min(end - start, 1 << 24))
                if not data:
                    raise OSError(errno.EIO, "is cut short", str(section.path))
                found.update(data)
                start += len(data)
    return found.hexdigest()


# -- stats -----------------------------------------------------------------------------------------


class SourceStat(NamedTuple):
    """Same stat, same bytes. The change time reveals an edit whose mtime was set back."""

    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int


class TargetStat(NamedTuple):
    """The same for cache files, without the change time: a second hard link alters it."""

    size: int
    mtime_ns: int
    inode: int


def source_stat(stat: os.stat_result) -> SourceStat:
    """Return the stat that identifies a source's content."""
    return SourceStat(stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino)


def target_stat(stat: os.stat_result) -> TargetStat:
    """Return the stat that identifies a cache file's content."""
    return TargetStat(stat.st_size, stat.st_mtime_ns, stat.st_ino)
