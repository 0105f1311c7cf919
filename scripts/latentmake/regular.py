"""Open regular files alone: a pipe may never say anything, and a device never end."""

from __future__ import annotations

import errno
import io
import os
from stat import S_ISREG


def open_regular(path: str | os.PathLike[str]) -> tuple[io.FileIO, int]:
    """Open a regular file for unbuffered reading, without waiting; return it and its size.

    Raises:
        ValueError: it is a folder, a pipe, a socket or a device.
        OSError: it cannot be opened.
    """
    try:
        file = io.FileIO(path, opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))
    except IsADirectoryError:
        raise ValueError("is a folder") from None
    stat = os.fstat(file.fileno())
    if not S_ISREG(stat.st_mode):
        file.close()
        raise ValueError("is no regular file")
    return file, stat.st_size


def read_regular(path: str | os.PathLike[str]) -> bytes:
    """Return the content of a regular file.

    Raises:
        OSError: it cannot be read, or is a folder, a pipe, a socket or a device.
    """
    try:
        file, _ = open_regular(path)
    except ValueError as error:
        raise OSError(errno.EINVAL, str(error), str(path)) from None
    with file:
        return file.readall()
