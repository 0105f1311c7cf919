"""SHA-256 digests of bytes, files and plain values; and stats, which identify unchanged files.

All digests are SHA-256, so that `sha256sum` of a source prints the digest in a cache file's header.
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

from latentmake.base.regular import open_regular

_LONG = 4 << 30  # bytes; reading more takes seconds, so a progress bar is shown


def canonical(value: object) -> str:
    """Return the canonical JSON of a plain value: sorted keys, no spaces, no escaped letters."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def of_bytes(data: bytes) -> str:
    """Return the SHA-256 of bytes, as 64 hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()


def of_value(value: object) -> str:
    """Return the SHA-256 of a plain value's canonical JSON."""
    return of_bytes(canonical(value).encode())


def of_lines(lines: Iterable[str]) -> str:
    """Return the SHA-256 of lines, in their order."""
    return of_bytes("\n".join(lines).encode("utf-8", "surrogateescape"))


def of_entries(entries: object) -> str:
    """Return the SHA-256 of a listing (tuples of text and integers), in its order.

    The entries are not sorted: the order of a folder's entries changes only if the folder does. If
    it ever changed otherwise, the files would be judged again, which only costs time.
    """
    # Version 2 of the marshal format depends only on values, not on which objects are shared.
    return of_bytes(marshal.dumps(entries, 2))  # type: ignore[arg-type]


class Section(NamedTuple):
    """A section of a file, with a digest of its own.

    Attributes:
        path: path of the file.
        name: name of the section.
        described: plain value that is digested before the bytes, such as names and shapes.
        ranges: ranges of bytes: the first, and one after the last.
    """

    path: Path
    name: str
    described: object
    ranges: tuple[tuple[int, int], ...]

    def __str__(self) -> str:
        """Return the section's name in the memo."""
        return f"{self.path}#{self.name}"

    def stat(self) -> os.stat_result:
        """Return the stat of the file."""
        return self.path.stat()


def of_file(path: Path | Section, *, quiet: bool = False) -> str:
    """Return the SHA-256 of a file's content. Large files show a progress bar unless `quiet`.

    Raises:
        OSError: the file cannot be read, or is no regular file.
    """
    if isinstance(path, Section):
        return _of_section(path)
    file, size = open_regular(path)
    with file:
        if quiet or size < _LONG:
            return hashlib.file_digest(file, "sha256").hexdigest()
        from latentmake.base.progress import Progress

        result = hashlib.sha256()
        bar = Progress(total=size, desc=f"reading {path.name}", unit="B", unit_scale=True)
        with bar as progress:
            while data := file.read(1 << 24):
                result.update(data)
                progress.update(len(data))
        return result.hexdigest()


def _of_section(section: Section) -> str:
    result = hashlib.sha256(canonical(section.described).encode())
    file, _ = open_regular(section.path)
    with file:
        for start, end in section.ranges:
            file.seek(start)
            while start < end:
                data = file.read(min(end - start, 1 << 24))
                if not data:
                    raise OSError(errno.EIO, "is cut short", str(section.path))
                result.update(data)
                start += len(data)
    return result.hexdigest()


# -- stats -----------------------------------------------------------------------------------------


class SourceStat(NamedTuple):
    """Stat of a source; equal stats mean equal bytes. ctime reveals an edit with an old mtime."""

    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int


class TargetStat(NamedTuple):
    """Stat of a cache file, without the change time, which a further hard link would change."""

    size: int
    mtime_ns: int
    inode: int


def source_stat(stat: os.stat_result) -> SourceStat:
    """Return the stat that identifies a source's content."""
    return SourceStat(stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino)


def target_stat(stat: os.stat_result) -> TargetStat:
    """Return the stat that identifies a cache file's content."""
    return TargetStat(stat.st_size, stat.st_mtime_ns, stat.st_ino)
