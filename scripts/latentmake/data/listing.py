"""List a dataset's folder: `scan` stats every file, and digests paths and stats.

If nothing changed in a folder, a plan only lists it. Else `folders.items` makes items of the
listing.
"""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path
from stat import S_ISDIR, S_ISREG

from latentmake.base import digest
from latentmake.base.digest import source_stat
from latentmake.base.errors import DatasetError
from latentmake.base.paths import is_remote
from latentmake.config.datasets import Dataset
from latentmake.data.item import NO_FILE, Entry, Scan, broken_link, missing_file


def scan(name: str, dataset: Dataset, key: str = "path") -> Scan:
    """List the folder in a dataset's `path` or `control_directory`.

    Sub-folders are listed unless the dataset is `flat`. Hidden files and folders are skipped.

    Raises:
        DatasetError: the folder is missing or unreadable.
    """
    root, where = getattr(dataset, key), f"datasets.{name}.{key}"
    if is_remote(root):
        from latentmake.data import remote

        root = root.rstrip("/")
        entries = remote.listing(root, where)
        if dataset.flat:
            entries = [entry for entry in entries if "/" not in entry[0]]
    else:
        root = os.path.normpath(root)
        try:
            entries = _entries(root, flat=dataset.flat)
        except OSError as error:
            what = f"{error.filename} cannot be read ({error.strerror})"
            hint = "give your user permission to read it"
            if isinstance(error, FileNotFoundError | NotADirectoryError):
                folder = error.filename
                if folder != folder.strip():  # quotes show a space at its end
                    folder = f'"{folder}"'
                what = f"the dataset folder {folder} does not exist, or is a file"
                hint = "correct the path or create it"
                if broken_link(error.filename):
                    what = f"the dataset folder {error.filename} {missing_file(error.filename)}"
                    hint = "mount its drive, or correct the link"
            raise DatasetError(what, where=where, hint=hint) from None
    listed: object = entries
    if key == "path" and dataset.metadata_file is not None:
        with contextlib.suppress(OSError):  # code that reads it reports the error
            listed = entries, tuple(source_stat(Path(dataset.metadata_file).stat()))
    return Scan(root, entries, digest.of_entries(listed))


def _entries(root: str, *, flat: bool) -> list[Entry]:
    entries: list[Entry] = []
    seen: set[tuple[int, int]] = set()  # device and inode of folders: links may form a circle
    pending, links = [("", root)], list[tuple[str, str]]()
    while pending or links:
        # Links come last: a folder that a link leads to is listed under its own name.
        prefix, folder = (pending or links).pop()
        status = os.stat(folder)  # noqa: PTH116
        if (status.st_dev, status.st_ino) in seen:
            continue
        seen.add((status.st_dev, status.st_ino))
        # Plain tuples and few calls: a plan with nothing to do spends most of its time here.
        with os.scandir(folder) as listing:
            for entry in listing:
                if entry.name[0] == ".":
                    continue
                path = prefix + entry.name
                try:
                    stat = entry.stat()
                except OSError as error:
                    if error.errno not in (errno.ENOENT, errno.ELOOP, errno.ENOTDIR):
                        raise
                    entries.append((path, *NO_FILE))
                    continue
                if S_ISREG(stat.st_mode):
                    changed = stat.st_ctime_ns
                    entries.append((path, stat.st_size, stat.st_mtime_ns, changed, stat.st_ino))
                elif not S_ISDIR(stat.st_mode):  # reading a pipe would never end
                    entries.append((path, *NO_FILE))
                elif not flat:
                    (links if entry.is_symlink() else pending).append((f"{path}/", entry.path))
        links.sort(reverse=True)
    return entries
