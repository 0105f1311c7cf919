"""Open regular files only: reading a pipe would never end, and a folder is no file."""

from __future__ import annotations

import io
import os
from stat import S_ISREG

__all__ = ["open_regular"]


def open_regular(path: str | os.PathLike[str]) -> tuple[io.FileIO, int]:
    """Open a regular file for unbuffered reading, without waiting for anybody.

    Returns:
        The open file and its size in bytes.

    Raises:
        ValueError: it is a folder, a pipe, a socket or a device.
        OSError: it cannot be opened.
    """
    try:
        file = io.FileIO(os.fspath(path), opener=_unblocked)
    except IsADirectoryError:
        raise ValueError("is a folder") from None
    stat = os.fstat(file.fileno())
    if not S_ISREG(stat.st_mode):
        file.close()
        raise ValueError("is no regular file")
    return file, stat.st_size


def _unblocked(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)
