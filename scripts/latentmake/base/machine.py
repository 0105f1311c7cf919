"""Facts about this machine and process: room on disks, cores, output of commands, memory."""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from latentmake.base.errors import StorageError

_SINGULAR = {"": "", "are": "is", "have": "has"}


class Need(NamedTuple):
    """Disk space for files that will be written.

    Attributes:
        what: name of the files, in messages.
        folder: folder of the files; it may be missing.
        size: number of bytes.
    """

    what: str
    folder: str
    size: int


def human(size: float) -> str:
    """Return a number of bytes in readable form: `0.5 GB`."""
    for unit, factor, least in (("TB", 1e12, 1e12), ("GB", 1e9, 1e8), ("MB", 1e6, 1e5)):
        if size >= least:
            return f"{size / factor:.1f} {unit}"
    return f"{size / 1e3:.1f} kB" if size >= 100 else f"{size:.0f} B"


def free(folder: str | os.PathLike[str]) -> int:
    """Return the free bytes of the file system of a folder, which may be missing."""
    return shutil.disk_usage(_existing(folder)).free


def shortages(needs: Iterable[Need]) -> Iterator[StorageError]:
    """Yield an error for each file system that has too little space for its files."""
    disks: dict[int, list[Need]] = {}
    for need in needs:
        if need.size:
            disks.setdefault(_existing(need.folder).stat().st_dev, []).append(need)
    for together in disks.values():
        available, total = free(together[0].folder), sum(need.size for need in together)
        if total > available:
            what = ", ".join(f"{human(need.size)} of {need.what}" for need in together)
            yield StorageError(
                f"{what} must be written, but only {human(available)} is free",
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
    """Return the number of cores that this process may use; a cluster's job may use only some.

    On macOS, which does not know such limits, this is the number of all cores.
    """
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def duration(minutes: float) -> str:
    """Return a time in readable form: `40 s`, `25 min`, `3.5 h`."""
    if minutes < 1:
        return f"{max(1, round(minutes * 60))} s"
    return f"{round(minutes)} min" if minutes < 120 else f"{minutes / 60:.1f} h"


def counted(number: int, noun: str, verb: str = "") -> str:
    """Return a number with its noun, and the verb `are` or `have`: `1 target`, `2 files are`."""
    if number == 1:
        return f"1 {noun} {_SINGULAR[verb]}".rstrip()
    return f"{number} {noun}s {verb}".rstrip()


def expect_many_objects() -> None:
    """Make Python search for garbage rarely, because most objects live until the process ends.

    Among modules, a plan and Snakemake's graph, the searches take a tenth of a build that has
    nothing to do.
    """
    gc.set_threshold(200_000, 20, 100)


@contextlib.contextmanager
def many_objects() -> Iterator[None]:
    """Turn garbage collection off while a plan is made.

    Plan and graph are millions of small objects that live until the process ends. Collections would
    search them again and again, which would take longer than making them. `freeze` keeps later
    collections from searching them.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        expect_many_objects()
        gc.enable()


def said(*command: str) -> str:
    """Return the output of a command; "" if the command is missing or fails."""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
        return "" if done.returncode else done.stdout.strip()
    return ""
