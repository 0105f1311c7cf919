"""Removal of listed files: unchanged ones alone, and never through a link.

`shutil.rmtree` spares links as well, but takes whatever lies in a folder.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from pathlib import PurePosixPath
from stat import S_ISREG
from typing import NamedTuple


class ListedFile(NamedTuple):
    """A regular file, and what tells whether it is still the same.

    Attributes:
        links: number of its names.
    """

    path: str
    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int
    links: int

    @classmethod
    def of(cls, path: str, stat: os.stat_result) -> ListedFile:
        """Return that of a path."""
        times = stat.st_mtime_ns, stat.st_ctime_ns
        return cls(path, stat.st_size, *times, stat.st_ino, stat.st_nlink)

    def is_same(self, stat: os.stat_result) -> bool:
        """Whether a file is still this one; removing another of its names changes its ctime."""
        seen = stat.st_size, stat.st_mtime_ns, stat.st_ino
        return S_ISREG(stat.st_mode) and seen == (self.size, self.mtime_ns, self.inode)


def files_below(folder: str) -> Iterator[tuple[str, ListedFile | None]]:
    """Yield the path of each file below a folder; with None in place of a link, a pipe and so on.

    Links are not followed, and a folder that is one yields itself. One that is missing or that
    cannot be read yields nothing.
    """
    if os.path.islink(folder):  # noqa: PTH114
        yield folder, None
        return
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            if entry.is_dir(follow_symlinks=False):
                yield from files_below(entry.path)
            elif entry.is_file(follow_symlinks=False):
                with contextlib.suppress(FileNotFoundError):
                    stat = entry.stat(follow_symlinks=False)
                    yield entry.path, ListedFile.of(entry.path, stat)
            else:
                yield entry.path, None


def freed(files: Iterable[ListedFile]) -> int:
    """Return the bytes that removing all of some files frees: a file with other names stays."""
    names: dict[int, int] = {}
    total = 0
    for each in files:
        names[each.inode] = names.get(each.inode, 0) + 1
        total += each.size if names[each.inode] == each.links else 0
    return total


def remove(file: ListedFile) -> bool:
    """Delete a listed file; return False where its name is another file's now, or nobody's.

    Each folder of its path but the first is opened in the one before and must be no link, so that
    nothing elsewhere is deleted where a folder was replaced by a link since.

    Raises:
        OSError: it cannot be deleted.
    """
    first, *folders, name = PurePosixPath(file.path).parts
    flags = os.O_RDONLY | os.O_DIRECTORY
    try:
        place = os.open(first, flags)
    except (FileNotFoundError, NotADirectoryError):
        return False
    try:
        for folder in folders:
            try:
                inner = os.open(folder, flags | os.O_NOFOLLOW, dir_fd=place)
            except (FileNotFoundError, NotADirectoryError):  # the latter is that of a link as well
                return False
            os.close(place)
            place = inner
        try:
            if not file.is_same(os.stat(name, dir_fd=place, follow_symlinks=False)):
                return False
            os.unlink(name, dir_fd=place)
        except FileNotFoundError:
            return False
        return True
    finally:
        os.close(place)


def remove_empty(paths: Iterable[str]) -> None:
    """Remove the folders of some paths that are empty now, but not the first of each path."""
    above = {str(each) for path in paths for each in [*PurePosixPath(path).parents][:-2]}
    for folder in sorted(above, key=len, reverse=True):
        with contextlib.suppress(OSError):  # it is not empty, or a link
            os.rmdir(folder)  # noqa: PTH106
