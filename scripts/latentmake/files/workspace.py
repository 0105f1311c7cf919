"""Folders that a project writes: checks of their names and access, and owners of shared ones."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

from latentmake.errors import ConfigError, StorageError, storage_error
from latentmake.files import atomic

OWNER = ".latentmake-owner"
"""Note of the project that owns a cache folder which lies outside of it."""
ADOPTED = "adopted.tsv"
"""Record of adopted files, in the cache folder of a dataset's model."""
_WRITTEN = ("logs", ".latentmake", ".snakemake")


def check_folder(home: Path, *, dry: bool) -> None:
    """Refuse a working folder, or a folder of the Snakefile (`home`), that Snakemake cannot use."""
    if set("{}") & set(str(home)):
        raise ConfigError(
            "Snakemake cannot read a Snakefile in a folder with braces in its path",
            where=home,
            hint="rename the folder; those of datasets and models may have braces",
        )
    snakemake = Path(".snakemake")
    if dry and snakemake.is_dir() and not os.access(snakemake, os.W_OK | os.X_OK):
        raise StorageError(  # a dry run makes folders there too
            "no permission to write", where=snakemake, hint="give your user the right to write"
        )
    for name in () if dry else _WRITTEN:
        _try_to_write(Path(name))
    # That of PuLP, with which Snakemake chooses jobs; Python's own falls back on other folders.
    temporary = Path(os.environ.get("TMP", os.environ.get("TMPDIR", "/tmp")))  # noqa: S108
    if not dry and os.access(temporary, os.W_OK | os.X_OK):
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
