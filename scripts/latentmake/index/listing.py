"""Listing of a cache folder."""

from __future__ import annotations

import marshal
import os
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from latentmake import digest
from latentmake.errors import CacheError
from latentmake.index.memo import Listing, TargetStat

unpacked: Callable[[bytes], list[Any]] = marshal.loads
"""Return the entries of a block that `packed` made."""


class Folder:
    """Files of a cache folder and its sub-folders.

    Links to folders outside of it are followed. Other links are listed like files, because they may
    lead in circles. A folder that cannot be read is a CacheError.

    Attributes:
        blocks: each folder's path, and some of its files: name, size, mtime_ns and inode, `packed`.
        fingerprint: digest of all that.
        has_links: whether any of them is a symbolic link.
    """

    def __init__(self, path: str) -> None:
        self.blocks: list[tuple[str, bytes]] = []
        self.has_links = False
        self._places = [f"{os.path.realpath(path).rstrip('/')}/"]
        pending = [path]
        while pending:
            folder = pending.pop()
            try:
                self.blocks += ((folder, block) for block in packed(self._files(folder, pending)))
            except (FileNotFoundError, NotADirectoryError):
                continue
            except OSError as error:
                what = f"cannot be read ({error.strerror})"
                raise CacheError(what, where=folder, hint="check its permissions") from None
        digests = [(folder, digest.of_bytes(block)) for folder, block in self.blocks]
        self.fingerprint = digest.of_entries(sorted(digests))

    def _files(self, folder: str, pending: list[str]) -> Iterator[tuple[str, int, int, int]]:
        """Yield the files of a folder; add its sub-folders to those that are pending."""
        # Listed by its number, the kernel need not look up the folder for each file. Plain tuples
        # and little else: this loop is the cost of a plan with nothing to do.
        place = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            with os.scandir(place) as found:
                for entry in found:
                    if not entry.is_file(follow_symlinks=False):
                        self.has_links |= entry.is_symlink()
                        path = f"{folder}/{entry.name}"
                        if entry.is_dir(follow_symlinks=False) or self._leads_out(path):
                            pending.append(path)
                            continue
                    try:
                        stat = entry.stat(follow_symlinks=False)
                    except FileNotFoundError:
                        continue  # a running job has renamed or removed it since
                    yield entry.name, stat.st_size, stat.st_mtime_ns, stat.st_ino
        finally:
            os.close(place)

    def _leads_out(self, path: str) -> bool:
        """Whether a path is a link to a folder that is not listed yet; notes that folder."""
        if not (Path(path).is_symlink() and Path(path).is_dir()):
            return False
        place = f"{os.path.realpath(path).rstrip('/')}/"
        if any(place.startswith(each) or each.startswith(place) for each in self._places):
            return False
        self._places.append(place)
        return True

    def listing(self) -> Listing:
        """Return the path and stat of every file."""
        files = ((folder, file) for folder, block in self.blocks for file in unpacked(block))
        return {f"{folder}/{name}": TargetStat(*stat) for folder, (name, *stat) in files}


def packed(entries: Iterable[Any]) -> Iterator[bytes]:
    """Pack the entries of a listing, tuples of text and whole numbers; equal ones equally."""
    entries = iter(entries)  # half a million tuples would cost more than the rest of a plan
    while block := [*islice(entries, 1024)]:
        yield marshal.dumps(block, 2)  # of version 2, because of what `of_entries` says
