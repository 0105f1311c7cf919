"""Folders that a project writes: whether they can be written, and whose they are."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

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
