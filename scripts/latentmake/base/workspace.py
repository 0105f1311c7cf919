"""Folders that a project writes: their names on other systems, access, owners and free space.

Published files are often used on another system than the one that made them. Paths are translated
by the user's maps and by WSL's rule for drives: `X:/` is `/mnt/x`.
"""

from __future__ import annotations

import contextlib
import ntpath
import os
import posixpath
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePath, PurePosixPath, PureWindowsPath
from typing import Literal, NamedTuple

from latentmake.base import atomic
from latentmake.base.errors import ConfigError, StorageError, storage_error

OWNER = ".latentmake-owner"
"""Name of the file that notes which project owns a cache folder outside of that project."""
_WRITTEN = ("logs", ".latentmake", ".snakemake")


def check_folder(home: Path, *, dry: bool) -> None:
    """Refuse a working folder, or a folder of the Snakefile (`home`), that Snakemake cannot use."""
    if set("{}") & set(str(home)):
        what = "Snakemake cannot read a Snakefile in a folder with braces in its path"
        hint = "rename the folder; those of datasets and models may have braces"
        raise ConfigError(what, where=home, hint=hint)
    if dry:
        return
    for name in _WRITTEN:
        _try_to_write(Path(name))
    # PuLP, with which Snakemake chooses jobs, uses only this folder for temporary files. Python
    # itself would try others, too.
    temporary = Path(os.environ.get("TMP", os.environ.get("TMPDIR", "/tmp")))  # noqa: S108
    if os.access(temporary, os.W_OK | os.X_OK):
        _try_to_write(temporary, "set TMPDIR to another folder, or ")


def check_run_folder(folder: Path) -> None:
    """Refuse a run's folder if it is a file or cannot be written."""
    place = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    if not place.is_dir():
        what = "a file is in the place of a folder"
        raise StorageError(what, where=place, hint="remove the file, or rename it")
    if not os.access(place, os.W_OK | os.X_OK):
        hint = "give your user the right to write there, or mount it for writing"
        raise StorageError("this folder cannot be written", where=place, hint=hint)


def _try_to_write(folder: Path, remedy: str = "") -> None:
    """Write an unnamed file, so that a full disk is found before a job starts."""
    try:
        folder.mkdir(exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(1 << 16))  # about the room for Snakemake's log and locks
            file.flush()
            os.fsync(file.fileno())  # some file systems report a full disk only now
    except OSError as error:
        fault = storage_error(error, folder) or StorageError(
            f"cannot be written: {error.strerror}", where=folder, hint="check the folder"
        )
        raise StorageError(fault.what, where=folder, hint=remedy + fault.hint) from None


# -- shared cache folders -------------------------------------------------------------------------


def other_owner(dataset: str) -> Path | None:
    """Return the other project that owns the caches of a dataset; None if there is none.

    A project owns the folders inside of it. If `cache` or a dataset's folder is a link or a mount,
    the first project that builds there notes its path in a file. The note of a project that was
    moved, copied or deleted does not count, because its path no longer leads to this folder.
    """
    folder = Path("cache", dataset)
    noted = None
    with contextlib.suppress(OSError):
        noted = Path(os.fsdecode((folder / OWNER).read_bytes()))
    place = noted or Path(os.path.realpath(folder))
    project = place.parent.parent
    try:
        if not place.samefile(folder) or project.samefile("."):
            return None
    except PermissionError:
        return project  # it belongs to another user
    except (OSError, ValueError):
        return None
    builds = any((project / name).exists() for name in (".latentmake", ".snakemake", "runs"))
    return project if noted or builds else None


def claim(datasets: Iterable[str]) -> None:
    """Note this project as the owner of those datasets' caches that lie outside of it."""
    for dataset in datasets:
        folder = Path("cache", dataset)
        own_folder = Path.cwd() / folder
        with contextlib.suppress(OSError, StorageError):  # a note is optional
            existing = folder if folder.exists() else folder.parent
            is_mount = existing.stat().st_dev != Path().stat().st_dev
            outside = is_mount or os.path.realpath(folder) != str(own_folder)
            if outside and other_owner(dataset) is None:
                atomic.write(folder / OWNER, os.fsencode(own_folder))


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


System = Literal["linux", "windows", "wsl"]

_WINDOWS = re.compile(r"[A-Za-z]:([/\\]|$)|[/\\]{2}[^/\\]")


def is_windows(path: str) -> bool:
    r"""Whether a path is an absolute path of Windows: `D:\x`, `D:/x` or `\\server\share`."""
    return _WINDOWS.match(path) is not None


def is_text(path: str) -> bool:
    """Whether a path is valid UTF-8; names on a disk may have other bytes."""
    try:
        return path.isascii() or bool(path.encode())
    except UnicodeEncodeError:
        return False


def is_remote(path: str) -> bool:
    """Whether a path is a URL, such as `s3://bucket/folder`."""
    return "://" in path


def absolute(path: str) -> str:
    """Return the absolute path of a path; a Windows path stays as it is."""
    return path if is_windows(path) else os.path.abspath(path)  # noqa: PTH100 -- links stay


def translate(path: str, to: System, maps: Iterable[Mapping[str, str | None]]) -> str | None:
    """Return the name of an absolute path on another system, with forward slashes.

    The longest folder of the maps that contains the path decides. A map wins over `/mnt/x`, and
    earlier maps win over later ones. Only Windows paths ignore case.

    Args:
        path: path of any system.
        to: system of the result.
        maps: maps of one folder each: system -> name of the folder there, or None.

    Returns:
        The path; None if `to` has no name for it. On Linux and WSL, every path that is not a
        Windows path keeps its name by default.
    """
    place = _pure(path)
    if drive := re.match(r"([A-Za-z]):/|/mnt/([a-z])(?:/|$)", place.as_posix()):
        letter = drive[1] or drive[2]
        mount = f"/mnt/{letter.lower()}"
        maps = [*maps, {"windows": f"{letter.upper()}:", "linux": mount, "wsl": mount}]
    matches = [
        (len(prefix.parts), _pure(target) / place.relative_to(prefix))
        for names in maps
        if (target := names.get(to))
        for prefix in map(_pure, filter(None, names.values()))
        if type(prefix) is type(place) and place.is_relative_to(prefix)
    ]
    if not matches and isinstance(place, PureWindowsPath) != (to == "windows"):
        return None
    name = max(matches, key=lambda match: match[0], default=(0, place))[1].as_posix()
    return name.rstrip("/") if name.startswith("//") else name  # a share's name ends in no slash


def _pure(path: str) -> PurePath:
    if is_windows(path):
        return PureWindowsPath(ntpath.normpath(f"{path}/"))
    return PurePosixPath(posixpath.normpath(path))


def duration(minutes: float) -> str:
    """Return a time in readable form: `40 s`, `25 min`, `3.5 h`."""
    if minutes < 1:
        return f"{max(1, round(minutes * 60))} s"
    return f"{round(minutes)} min" if minutes < 120 else f"{minutes / 60:.1f} h"
