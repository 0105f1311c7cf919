"""Atomic writes and links, and locks that end with their process.

Each file is made under a temporary name in the same folder and renamed. There is no fsync: a cache
file that a power failure cut short has the wrong length and is found damaged. A full or read-only
disk is a StorageError, anything else an OSError.

The processes that a holder starts with `inherited()` hold its locks as well: a lock is free when
all have ended.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import socket
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

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
        told: Exception | None = storage_error(error, path)
        if told is None and error.filename in (None, os.fspath(temporary)):
            told = OSError(error.errno, error.strerror, os.fspath(path))
        raise told or error from None


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
    """
    new = folder.with_name(f".{folder.name}{TEMPORARY_SUFFIX}")
    try:
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir(parents=True)
        yield new
        open_to_group(new, "**/*")
        shutil.rmtree(folder, ignore_errors=True)
        new.rename(folder)
    except BaseException as error:  # Ctrl-C too
        shutil.rmtree(new, ignore_errors=True)
        if not isinstance(error, Exception):
            raise
        # torch and safetensors have their own error for a full disk
        raise storage_error(error, folder) or error from None


def remove(path: Path) -> None:
    """Remove a file, a link or a folder with all that it holds, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


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


_held: set[int] = set()


def inherited() -> tuple[int, ...]:
    """Return the files of all locks that this process holds, as `pass_fds` of a child."""
    return tuple(_held)


class Lock:
    """A lock file with a line on who holds it.

    Args:
        path: of the file; its folder is there.
        about: what the holder does, for whoever waits.
    """

    def __init__(self, path: Path, about: str) -> None:
        self.path = path
        self._about = about
        self._file: BinaryIO | None = None

    def acquire(self, *, wait: bool = False) -> bool:
        """Return whether this process holds it now; an OSError says that nobody can."""
        file = self.path.open("ab")  # not "wb": the holder's line would be gone
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BaseException as error:
            file.close()
            if isinstance(error, BlockingIOError):
                return False
            raise
        line = f"process {os.getpid()} on {socket.gethostname()} ({self._about} in {Path.cwd()})"
        with contextlib.suppress(OSError):  # a full disk: nobody is told who
            file.truncate(0)
            file.write(os.fsencode(line))
            file.flush()
        self._file = file
        _held.add(file.fileno())
        return True

    def holder(self) -> str:
        """Return who holds it, in words."""
        with contextlib.suppress(OSError):
            return self.path.read_text(errors="replace") or "another process"
        return "another process"

    def close(self) -> None:
        """Release it: the lock is free once no other process has the file open."""
        if self._file is not None:
            _held.discard(self._file.fileno())
            self._file.close()
            self._file = None
