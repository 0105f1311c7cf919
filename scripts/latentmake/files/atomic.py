"""Atomic writes and links: a name never stands for half a file.

Each file is made under a temporary name in the same folder and renamed. There is no fsync: a cache
file that a power failure cut short has the wrong length and is found damaged. A full or read-only
disk is a StorageError, anything else an OSError.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

from latentmake import digest
from latentmake.errors import storage_error

TEMPORARY_SUFFIX = ".latentmake-partial"

_own = threading.local()


@contextlib.contextmanager
def replacing(path: Path, *, one_writer: bool = False) -> Iterator[Path]:
    """Yield a temporary name whose file takes a path's place at the end of the `with`.

    The path's folder is made where it is missing. With `one_writer` the temporary name is the same
    each time, so that the next call removes what a killed one left.
    """
    # Short, whatever the name's length; process and thread tell writers of one name apart.
    unique = digest.of_bytes(path.name.encode())[:16]
    if not one_writer:
        unique = f"{unique}.{os.getpid()}.{threading.get_ident()}"
    temporary = path.with_name(f".{unique}{TEMPORARY_SUFFIX}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Left by a killed `link` it is another name of a finished file, which would be overwritten.
        temporary.unlink(missing_ok=True)
        yield temporary
        temporary.replace(path)
        temporary.unlink(missing_ok=True)  # rename does nothing between two names of one file
    except BaseException as error:  # Ctrl-C too
        with contextlib.suppress(OSError):  # on a read-only disk even that is refused
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):
            if error.filename in (None, os.fspath(temporary)):
                error.filename = os.fspath(path)
            raise storage_error(error, path) or error from None
        raise


@contextlib.contextmanager
def replacing_folder(folder: Path) -> Iterator[Path]:
    """Yield a new folder that takes the place of another at the end of the `with`.

    Raises:
        StorageError: the disk is full or cannot be written.
    """
    new = folder.with_name(f".{folder.name}{TEMPORARY_SUFFIX}")
    try:
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir(parents=True)
        yield new
        shutil.rmtree(folder, ignore_errors=True)
        new.rename(folder)
    except Exception as error:  # torch and safetensors have their own for a full disk
        shutil.rmtree(new, ignore_errors=True)
        raise storage_error(error, folder) or error from None


def write(path: str | Path, *pieces: bytes | memoryview) -> os.stat_result:
    """Write a file, whose bytes come in pieces; return its stat.

    Its temporary name is unique over writers and machines. As few system calls as possible: there
    are hundreds of thousands of cache files.
    """
    place = os.fspath(path)
    folder = os.path.dirname(place)  # noqa: PTH120 -- a Path takes as long as the system's calls
    temporary = f"{folder}/" * bool(folder) + f".{_new_name()}{TEMPORARY_SUFFIX}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        try:
            file = os.open(temporary, flags, 0o666)
        except FileNotFoundError:
            os.makedirs(folder, exist_ok=True)  # noqa: PTH103
            file = os.open(temporary, flags, 0o666)
        try:
            _write_all(file, pieces)
            stat = os.fstat(file)
        finally:
            os.close(file)
        os.rename(temporary, place)  # noqa: PTH104
    except BaseException as error:  # Ctrl-C too
        with contextlib.suppress(OSError):  # on a read-only disk even that is refused
            os.unlink(temporary)  # noqa: PTH108
        if isinstance(error, OSError):
            error.filename = place
            error.filename2 = None
            raise storage_error(error, Path(place)) or error from None
        raise
    return stat


def _new_name() -> str:
    """Return a name that no writer has or had: another build may remove it as a leftover."""
    if getattr(_own, "process", None) != os.getpid():  # a new thread, or a copy of its process
        _own.process, _own.name, _own.count = os.getpid(), uuid.uuid4().hex, 0
    _own.count += 1
    return f"{_own.name}.{_own.count}"


def _write_all(file: int, pieces: Sequence[bytes | memoryview]) -> None:
    left = [memoryview(piece).cast("B") for piece in pieces if len(piece)]
    while left:
        written = os.writev(file, left)
        while left and written >= len(left[0]):
            written -= len(left.pop(0))
        if written:
            left[0] = left[0][written:]


def link(existing: Path, path: Path) -> None:
    """Give a finished file a second name, replacing what bears it; copy where links fail."""
    with replacing(path) as temporary:
        try:
            os.link(existing, temporary)
        except OSError:
            temporary.write_bytes(existing.read_bytes())


def open_to_group(folder: Path, pattern: str = "*") -> None:
    """Set the permissions that the umask says; safetensors lets only their owner read its files."""
    umask = os.umask(0)
    os.umask(umask)
    for file in filter(Path.is_file, folder.glob(pattern)):
        file.chmod(0o666 & ~umask)
