"""Atomic writes and links, and locks that end with their process.

A file is written under a temporary name in the same folder and then renamed. There is no fsync: if
a power failure cuts a cache file short, its length is wrong, and so it counts as damaged. A full or
read-only disk raises StorageError, anything else OSError.

Child processes that are started with `inherited()` hold the locks of their parent, too. A lock is
free when all of them have ended.
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

from latentmake.base.errors import storage_error

TEMPORARY_SUFFIX = ".latentmake-partial"


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary name whose file replaces `path` at the end of the `with`.

    A missing folder is created.
    """
    # A unique name: a leftover of the same name may be a hard link to a finished file, which would
    # be overwritten. It does not contain the file's name, which may have the maximal length.
    temporary = path.with_name(f".{uuid.uuid4().hex}{TEMPORARY_SUFFIX}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        temporary.replace(path)
        # `rename` between two hard links to the same file does nothing and leaves both names.
        temporary.unlink(missing_ok=True)
    except BaseException as error:  # also on Ctrl-C
        with contextlib.suppress(OSError):  # a read-only disk refuses even this
            temporary.unlink()
        if not isinstance(error, OSError):
            raise
        shown: Exception | None = storage_error(error, path)
        if shown is None and error.filename in (None, os.fspath(temporary)):
            shown = OSError(error.errno, error.strerror, os.fspath(path))
        raise shown or error from None


def write(path: str | Path, *pieces: bytes | memoryview) -> os.stat_result:
    """Write pieces of bytes to a file atomically, and return its stat."""
    with replacing(Path(path)) as temporary, temporary.open("xb") as file:
        file.writelines(pieces)
        file.flush()
        stat = os.fstat(file.fileno())
    return stat  # noqa: RET504 -- for mypy, a context may swallow errors


def create(path: Path, data: bytes) -> None:
    """Write a new file atomically; raises StorageError.

    Raises:
        FileExistsError: the path exists, perhaps as a broken link; it stays as it is.
    """
    temporary = path.with_name(f".{uuid.uuid4().hex}{TEMPORARY_SUFFIX}")
    try:
        temporary.write_bytes(data)
        try:
            os.link(temporary, path)  # `rename` would replace an existing file
        except PermissionError:  # exFAT and some network drives have no links
            with path.open("xb") as file:
                file.write(data)
    except OSError as error:
        fault = None if isinstance(error, FileExistsError) else storage_error(error, path)
        raise fault or error from None
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def replacing_folder(folder: Path) -> Iterator[Path]:
    """Yield a new folder that replaces `folder` at the end of the `with`.

    Its files get the permissions of the umask.
    """
    new = folder.with_name(f".{folder.name}{TEMPORARY_SUFFIX}")
    try:
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir(parents=True)
        yield new
        open_to_group(new, "**/*")
        shutil.rmtree(folder, ignore_errors=True)
        new.rename(folder)
    except BaseException as error:  # also on Ctrl-C
        shutil.rmtree(new, ignore_errors=True)
        if not isinstance(error, Exception):
            raise
        # `storage_error` also knows the errors of torch and safetensors for a full disk.
        raise storage_error(error, folder) or error from None


def remove(path: Path) -> None:
    """Remove a file, a link, or a folder with its content, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def link(existing: Path, path: Path) -> None:
    """Hard-link a finished file to `path`, replacing a file there; copy it if links fail."""
    with replacing(path) as temporary:
        try:
            os.link(existing, temporary)
        except OSError:
            shutil.copyfile(existing, temporary)


def open_to_group(folder: Path, pattern: str) -> None:
    """Give files the permissions of the umask. safetensors creates files only for their owner."""
    umask = os.umask(0)  # the umask can only be read by setting it
    os.umask(umask)
    for file in filter(Path.is_file, folder.glob(pattern)):
        file.chmod(0o666 & ~umask)


_held: set[int] = set()


def inherited() -> tuple[int, ...]:
    """Return the file descriptors of all locks that this process holds, for `pass_fds`."""
    return tuple(_held)


class Lock:
    """Lock file that contains a line about its holder.

    Args:
        path: path of the file, in an existing folder.
        about: activity of the holder, shown to processes that wait.
    """

    def __init__(self, path: Path, about: str) -> None:
        self.path = path
        self._about = about
        self._file: BinaryIO | None = None

    def acquire(self, *, wait: bool = False) -> bool:
        """Try to acquire the lock, and return whether this process holds it now.

        Raises:
            OSError: the file system does not allow locks, or the file cannot be opened.
        """
        file = self.path.open("ab")  # "wb" would delete the line of the present holder
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BaseException as error:
            file.close()
            if isinstance(error, BlockingIOError):
                return False
            raise
        line = f"process {os.getpid()} on {socket.gethostname()} ({self._about} in {Path.cwd()})"
        with contextlib.suppress(OSError):  # on a full disk, the line stays empty
            file.truncate(0)
            file.write(os.fsencode(line))
            file.flush()
        self._file = file
        _held.add(file.fileno())
        return True

    def holder(self) -> str:
        """Return a description of the holder."""
        with contextlib.suppress(OSError):
            return self.path.read_text(errors="replace") or "another process"
        return "another process"

    def close(self) -> None:
        """Release the lock. It is free when no child process has the file open either."""
        if self._file is not None:
            _held.discard(self._file.fileno())
            self._file.close()
            self._file = None
