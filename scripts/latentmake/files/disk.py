"""Limits of this machine: room on its disks for what is to be written, and cores."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from latentmake.errors import StorageError


class Need(NamedTuple):
    """Room for files that are to be written.

    Attributes:
        what: name of the files, in messages.
        folder: place of the files; it may have to be made.
        size: their bytes.
    """

    what: str
    folder: str
    size: int


def human(size: float) -> str:
    """Return a number of bytes for people: `0.5 GB`."""
    for unit, factor, least in (("TB", 1e12, 1e12), ("GB", 1e9, 1e8), ("MB", 1e6, 1e5)):
        if size >= least:
            return f"{size / factor:.1f} {unit}"
    return f"{size / 1e3:.1f} kB"


def free(folder: str | os.PathLike[str]) -> int:
    """Return the bytes that the user may still write where a folder lies, or will lie."""
    return shutil.disk_usage(_existing(folder)).free


def shortages(needs: Iterable[Need]) -> Iterator[StorageError]:
    """Yield an error for each file system that has no room for what is to be written there."""
    disks: dict[int, list[Need]] = {}
    for need in needs:
        if need.size:
            disks.setdefault(_existing(need.folder).stat().st_dev, []).append(need)
    for together in disks.values():
        there, total = free(together[0].folder), sum(need.size for need in together)
        if total > there:
            what = ", ".join(f"{human(need.size)} of {need.what}" for need in together)
            yield StorageError(
                f"{what} must be written, but only {human(there)} is free",
                where=together[0].folder,
                hint="free some space, or replace this folder by a link to a larger disk",
            )


def _existing(folder: str | os.PathLike[str]) -> Path:
    """Return a folder, or the nearest one above it that exists."""
    path = Path(folder).absolute()
    while not path.is_dir():
        path = path.parent
    return path


def usable_cores() -> int:
    """Return the number of cores that this process may use; a cluster's job gets only some.

    macOS does not tell; there it is the number of all cores.
    """
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
