"""Folders that a project writes: their names on each system, access, owners, room on their disks.

What is published is often used by another system than the one that made it. A path is translated
by the user's maps and by WSL's rule for drives: `X:/` lies under `/mnt/x`.
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

from latentmake.errors import ConfigError, StorageError, storage_error
from latentmake.files import atomic

OWNER = ".latentmake-owner"
"""Note of the project that owns a cache folder which lies outside of it."""
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
    # That of PuLP, with which Snakemake chooses jobs; Python's own falls back on other folders.
    temporary = Path(os.environ.get("TMP", os.environ.get("TMPDIR", "/tmp")))  # noqa: S108
    if os.access(temporary, os.W_OK | os.X_OK):
        _try_to_write(temporary, "set TMPDIR to another folder, or ")


def check_run_folder(folder: Path) -> None:
    """Refuse a run's folder that is none, or that cannot be written."""
    place = next(each for each in (folder, *folder.parents) if os.path.lexists(each))
    if not place.is_dir():
        what = "a file is in the place of a folder"
        raise StorageError(what, where=place, hint="remove the file, or rename it")
    if not os.access(place, os.W_OK | os.X_OK):
        hint = "give your user the right to write there, or mount it for writing"
        raise StorageError("this folder cannot be written", where=place, hint=hint)


def _try_to_write(folder: Path, remedy: str = "") -> None:
    """Write an unnamed file, to find a full disk before any job does."""
    try:
        folder.mkdir(exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(1 << 16))  # some room for Snakemake's log and locks
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        fault = storage_error(error, folder) or StorageError(
            f"cannot be written: {error.strerror}", where=folder, hint="check the folder"
        )
        raise StorageError(fault.what, where=folder, hint=remedy + fault.hint) from None


# -- shared cache folders -------------------------------------------------------------------------


def other_owner(dataset: str) -> Path | None:
    """Return the project that owns the caches of a dataset; None if it is this one, or gone.

    A folder inside of a project is its own. Where `cache`, or the folder of a dataset, is a link or
    a mount, the first project that builds there notes its path in a file. A project that was moved,
    copied or deleted has no such folder any more, or another one, so that its note counts for
    nothing.
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
        return project  # another user's
    except (OSError, ValueError):
        return None
    builds = any((project / each).exists() for each in (".latentmake", ".snakemake", "runs"))
    return project if noted or builds else None


def claim(datasets: Iterable[str]) -> None:
    """Note this project as the owner of the caches of some datasets that lie outside of it."""
    for dataset in datasets:
        folder = Path("cache", dataset)
        mine = Path.cwd() / folder
        with contextlib.suppress(OSError, StorageError):  # it cannot be written
            there = folder if folder.exists() else folder.parent
            is_mount = there.stat().st_dev != Path().stat().st_dev
            outside = is_mount or os.path.realpath(folder) != str(mine)
            if outside and other_owner(dataset) is None:
                atomic.write(folder / OWNER, os.fsencode(mine))


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
    return f"{size / 1e3:.1f} kB" if size >= 100 else f"{size:.0f} B"


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


System = Literal["linux", "windows", "wsl"]

_WINDOWS = re.compile(r"[A-Za-z]:([/\\]|$)|[/\\]{2}[^/\\]")


def is_windows(path: str) -> bool:
    r"""Whether a path is an absolute one of Windows: `D:\x`, `D:/x` or `\\server\share`."""
    return _WINDOWS.match(path) is not None


def is_text(path: str) -> bool:
    """Whether a path is UTF-8; a foreign one may be none."""
    try:
        return path.isascii() or bool(path.encode())
    except UnicodeEncodeError:
        return False


def is_remote(path: str) -> bool:
    """Whether a path is a URL, such as `s3://bucket/folder`."""
    return "://" in path


def absolute(path: str) -> str:
    """Return a path as an absolute one; a path of Windows stays as it is."""
    return path if is_windows(path) else os.path.abspath(path)  # noqa: PTH100 -- links stay


def translate(path: str, to: System, maps: Iterable[Mapping[str, str | None]]) -> str | None:
    """Return an absolute path as another system names it, with forward slashes.

    Of all names that the path begins with, component by component, the longest decides; a map wins
    over `/mnt/x`, earlier maps over later ones. Upper and lower case differ, but not in names of
    Windows.

    Args:
        path: of any system.
        to: the system.
        maps: each system -> its name of one folder, if it has one.

    Returns:
        None where `to` has no name for the path. Linux and WSL know every path that is not one of
        Windows by its own name.
    """
    place = _pure(path)
    if drive := re.match(r"([A-Za-z]):/|/mnt/([a-z])(?:/|$)", place.as_posix()):
        letter = drive[1] or drive[2]
        mount = f"/mnt/{letter.lower()}"
        maps = [*maps, {"windows": f"{letter.upper()}:", "linux": mount, "wsl": mount}]
    found = [
        (len(prefix.parts), _pure(target) / place.relative_to(prefix))
        for names in maps
        if (target := names.get(to))
        for prefix in map(_pure, filter(None, names.values()))
        if type(prefix) is type(place) and place.is_relative_to(prefix)
    ]
    if not found and isinstance(place, PureWindowsPath) != (to == "windows"):
        return None
    name = max(found, key=lambda each: each[0], default=(0, place))[1].as_posix()
    return name.rstrip("/") if name.startswith("//") else name  # a share's name has no slash


def _pure(path: str) -> PurePath:
    if is_windows(path):
        return PureWindowsPath(ntpath.normpath(f"{path}/"))
    return PurePosixPath(posixpath.normpath(path))


def duration(minutes: float) -> str:
    """Return a time for people: `40 s`, `25 min`, `3.5 h`."""
    if minutes < 1:
        return f"{max(1, round(minutes * 60))} s"
    return f"{round(minutes)} min" if minutes < 120 else f"{minutes / 60:.1f} h"
