"""Checks of the working folder and of runs' folders: their names, and write access."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from latentmake.errors import ConfigError, StorageError, storage_error

_WRITTEN = ("logs", ".latentmake", ".snakemake")
_LOGS = (
    *("captions", "clips", "evaluate", "export"),
    *("generate", "latents", "manifest", "publish", "report"),
    *("text", "train"),
)
"""Folders below `logs`."""
_PROBE = bytes(1 << 16)  # bytes: some room for Snakemake's log and locks


def check(home: Path, *, dry: bool) -> None:
    """Refuse a working folder, or a folder of the Snakefile (`home`), that Snakemake cannot use."""
    if set("{}") & set(str(home)):
        raise ConfigError(
            "Snakemake cannot read a Snakefile in a folder with braces in its path",
            where=home,
            hint="rename the folder; those of datasets and models may have braces",
        )
    for place in (home, Path.cwd()):
        if not _is_utf8(place):
            raise ConfigError(
                "Snakemake cannot write the name of this folder, which is not UTF-8",
                where=place,
                hint="rename the folder, or the one above it; caches stay fresh",
            )
    for name in _WRITTEN:
        folder = Path(name)
        if folder.is_dir():
            for each in (folder / log for log in _LOGS) if name == "logs" else ():
                if os.path.lexists(each) and not each.is_dir():
                    raise _in_the_way(each)
        elif folder.exists() or folder.is_symlink():
            raise _in_the_way(folder)
        if not dry:
            _try_to_write(folder)
        elif name == ".snakemake" and folder.is_dir() and not os.access(folder, os.W_OK | os.X_OK):
            raise StorageError(  # a dry run makes folders there too
                "no permission to write", where=folder, hint="give your user the right to write"
            )

    # That of PuLP, with which Snakemake chooses jobs; Python's own falls back on other folders.
    temporary = Path(os.environ.get("TMP", os.environ.get("TMPDIR", "/tmp")))  # noqa: S108
    if not dry and os.access(temporary, os.W_OK | os.X_OK):
        _try_to_write(temporary, "set TMPDIR to another folder, or ")


def check_run(folder: Path) -> None:
    """Refuse a run's folder that is none, or that cannot be written."""
    place = next(each for each in (folder, *folder.parents) if os.path.lexists(each))
    if not place.is_dir():
        raise _in_the_way(place)
    if not os.access(place, os.W_OK | os.X_OK):
        hint = "give your user the right to write there, or mount it for writing"
        raise StorageError("this folder cannot be written", where=place, hint=hint)


def _is_utf8(path: Path) -> bool:
    try:
        return bool(str(path).encode())
    except UnicodeEncodeError:
        return False


def _in_the_way(path: Path) -> StorageError:
    return StorageError(
        "a file is in the place of a folder", where=path, hint="remove the file, or rename it"
    )


def _try_to_write(folder: Path, remedy: str = "") -> None:
    """Write an unnamed file, to find a full disk before any job does."""
    try:
        folder.mkdir(exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(_PROBE)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        fault = storage_error(error, folder) or StorageError(
            f"cannot be written: {error.strerror}", where=folder, hint="check the folder"
        )
        raise StorageError(fault.what, where=folder, hint=remedy + fault.hint) from None
