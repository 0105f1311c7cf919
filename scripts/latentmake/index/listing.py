"""Listing of a cache folder."""

from __future__ import annotations

import os
from pathlib import Path

from latentmake import digest
from latentmake.errors import CacheError
from latentmake.index.memo import Listing, TargetStat

_File = tuple[str, int, int, int]  # name, size, mtime_ns and inode


class Folder:
    """Files of a cache folder and its sub-folders.

    Links to folders outside of it are followed. Other links are listed like files, because they may
    lead in circles. A folder that cannot be read is a CacheError.

    Attributes:
        folders: each folder's path, and its files.
        fingerprint: digest of all that.
        has_links: whether any of them is a symbolic link.
    """

    def __init__(self, path: str) -> None:
        self.folders: list[tuple[str, list[_File]]] = []
        self.has_links = False
        self._places = [f"{os.path.realpath(path).rstrip('/')}/"]
        pending = [path]
        while pending:
            folder, files = pending.pop(), list[_File]()
            try:
                # Plain tuples and little else: this loop is the cost of a plan with nothing to do.
                with os.scandir(folder) as found:
                    for entry in found:
                        if not entry.is_file(follow_symlinks=False):
                            self.has_links |= entry.is_symlink()
                            if entry.is_dir(follow_symlinks=False) or self._leads_out(entry):
                                pending.append(entry.path)
                                continue
                        try:
                            stat = entry.stat(follow_symlinks=False)
                        except FileNotFoundError:
                            continue  # a running job has renamed or removed it since
                        files.append((entry.name, stat.st_size, stat.st_mtime_ns, stat.st_ino))
                self.folders.append((folder, files))
            except (FileNotFoundError, NotADirectoryError):
                continue
            except OSError as error:
                what = f"cannot be read ({error.strerror})"
                raise CacheError(what, where=folder, hint="check its permissions") from None
        digests = [(folder, digest.of_entries(files)) for folder, files in self.folders]
        self.fingerprint = digest.of_entries(sorted(digests))

    def _leads_out(self, link: os.DirEntry[str]) -> bool:
        """Whether an entry is a link to a folder that is not listed yet; notes that folder."""
        if not (link.is_symlink() and Path(link.path).is_dir()):
            return False
        place = f"{os.path.realpath(link.path).rstrip('/')}/"
        if any(place.startswith(each) or each.startswith(place) for each in self._places):
            return False
        self._places.append(place)
        return True

    def listing(self) -> Listing:
        """Return the path and stat of every file."""
        files = (
            (f"{folder}/{name}", stat) for folder, each in self.folders for name, *stat in each
        )
        return {path: TargetStat(*stat) for path, stat in files}
