"""Listing of a cache folder."""

from __future__ import annotations

import os
from pathlib import Path

from latentmake.errors import CacheError
from latentmake.index.memo import TargetStat
from latentmake.sources.item import fingerprint

Listing = dict[str, TargetStat]
"""Path -> stat of every file."""


class Folder:
    """Files of a cache folder and its sub-folders.

    Links to folders outside of it are followed, others are listed like files: they may lead in
    circles, and what they lead to has a name of its own.

    Attributes:
        folders: each folder's path, and name, size, mtime_ns and inode of each of its files.
        fingerprint: digest of all that.
        has_links: whether any of them is a symbolic link.

    Raises:
        CacheError: a folder in it cannot be read.
    """

    def __init__(self, path: str) -> None:
        self.folders: list[tuple[str, list[tuple[str, int, int, int]]]] = []
        self.has_links = False
        self._places = [_real(path)]
        pending = [path]
        while pending:
            folder = pending.pop()
            entries: list[tuple[str, int, int, int]] = []
            try:
                # Plain tuples and little else: this loop is what doing nothing costs.
                with os.scandir(folder) as found:
                    for entry in found:
                        if not entry.is_file(follow_symlinks=False):
                            self.has_links |= entry.is_symlink()
                            if entry.is_dir(follow_symlinks=False) or (
                                entry.is_symlink() and self._leads_out(entry.path)
                            ):
                                pending.append(entry.path)
                                continue
                        try:
                            stat = entry.stat(follow_symlinks=False)
                        except FileNotFoundError:
                            continue  # a job that runs has renamed or removed it since
                        entries.append((entry.name, stat.st_size, stat.st_mtime_ns, stat.st_ino))
            except (FileNotFoundError, NotADirectoryError):
                continue
            except OSError as error:
                what = f"cannot be read ({error.strerror})"
                raise CacheError(what, where=folder, hint="check its permissions") from None
            self.folders.append((folder, entries))
        digests = [(folder, fingerprint(entries)) for folder, entries in self.folders]
        self.fingerprint = fingerprint(sorted(digests))

    def _leads_out(self, link: str) -> bool:
        """Whether a link leads to a folder without another name here; notes that folder."""
        place = _real(link)
        if not Path(link).is_dir() or any(
            place.startswith(known) or known.startswith(place) for known in self._places
        ):
            return False
        self._places.append(place)
        return True

    def listing(self) -> Listing:
        """Return the path and stat of every file."""
        return {
            f"{folder}/{name}": TargetStat(*stat)
            for folder, entries in self.folders
            for name, *stat in entries
        }


def _real(path: str) -> str:
    return f"{os.path.realpath(path).rstrip('/')}/"
