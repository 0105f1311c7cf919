"""Atomic writes and links: a name never stands for half a file.

Each file is made under a temporary name in the same folder and renamed. There is no fsync: a cache
file that a power failure cut short has the wrong length and is found damaged. A full or read-only
disk is a StorageError, anything else an OSError.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

from latentmake.errors import storage_error

TEMPORARY_SUFFIX = ".latentmake-partial"


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary name whose file takes a path's place at the end of the `with`.

    The path's folder is made where it is missing.
    """
    # A name that no writer on any machine has or had, short whatever the file's name. A leftover
    # under the same name could be another name of a finished file, which would be overwritten.
    temporary = path.with_name(f".{uuid.uuid4().hex}{TEMPORARY_SUFFIX}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        temporary.replace(path)
        temporary.unlink(missing_ok=True)  # rename does nothing between two names of one file
    except BaseException as error:  # Ctrl-C too
        with contextlib.suppress(OSError):  # on a read-only disk even that is refused
            temporary.unlink()
        if not isinstance(error, OSError):
            raise
        if error.filename in (None, os.fspath(temporary)):
            error.filename, error.filename2 = os.fspath(path), None
        raise storage_error(error, path) or error from None


def write(path: str | Path, *pieces: bytes | memoryview) -> os.stat_result:
    """Write a file, whose bytes come in pieces; return its stat."""
    with replacing(Path(path)) as temporary, temporary.open("xb") as file:
        file.writelines(pieces)
        file.flush()
        stat = os.fstat(file.fileno())
    return stat  # noqa: RET504 -- for mypy, a context may swallow errors


@contextlib.contextmanager
def replacing_folder(folder: Path) -> Iterator[Path]:
    """Yield a new folder that takes the place of another at the end of the `with`.

    Its files get the permissions that the umask says.

    Raises:
        StorageError: the disk is full or cannot be written.
    """
    new = folder.with_name(f".{folder.name}{TEMPORARY_SUFFIX}")
    try:
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir(parents=True)
        yield new
        open_to_group(new, "**/*")
        shutil.rmtree(folder, ignore_errors=True)
        new.rename(folder)
    except Exception as error:  # torch and safetensors have their own for a full disk
        shutil.rmtree(new, ignore_errors=True)
        raise storage_error(error, folder) or error from None


def link(existing: Path, path: Path) -> None:
    """Give a finished file a second name, replacing what bears it; copy where links fail."""
    with replacing(path) as temporary:
        try:
            os.link(existing, temporary)
        except OSError:
            shutil.copyfile(existing, temporary)


def open_to_group(folder: Path, pattern: str) -> None:
    """Set the permissions that the umask says; safetensors lets only their owner read its files."""
    umask = os.umask(0)
    os.umask(umask)
    for file in filter(Path.is_file, folder.glob(pattern)):
        file.chmod(0o666 & ~umask)
