"""Open regular files alone: reading a pipe would never end."""

from __future__ import annotations

import io
import os
from stat import S_ISREG

__all__ = ["open_regular"]


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
