"""Regular files: the one place that opens a file which a user names.

A path of a configuration, a list or a command line may lead to a folder, to a pipe, which may never
say anything, to a device, which may never end, or to a file that fits into no memory. Here each of
them is an OSError, like a file that is missing, so that the reader of the file names its key.
"""

from __future__ import annotations

import errno
import os
from io import FileIO
from stat import S_ISREG

_MOST = 1 << 26  # bytes of a file that is read as a whole, unless its reader knows better
_NO_FILE = "it is no regular file"

_Path = str | os.PathLike[str]


def open_regular(path: _Path) -> tuple[FileIO, int]:
    """Open a regular file for reading, unbuffered and without waiting; return it and its size.

    Raises:
        OSError: it cannot be opened, or is a folder, a pipe, a socket or a device.
    """
    try:
        file = FileIO(path, opener=_without_waiting)
    except ValueError:  # a NUL, or half a character
        raise _refused(path, "no file can have this name") from None
    except OSError as error:
        if error.errno != errno.ENXIO:  # a socket
            raise
        raise _refused(path, _NO_FILE) from None
    stat = os.fstat(file.fileno())
    if not S_ISREG(stat.st_mode):
        file.close()
        raise _refused(path, _NO_FILE)
    return file, stat.st_size


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)


def _refused(path: _Path, what: str) -> OSError:
    return OSError(errno.EINVAL, what, os.fspath(path))


def read_regular(path: _Path, most: int | None = _MOST) -> bytes:
    """Return the content of a regular file; an OSError if it is none, or larger than `most`."""
    file, size = open_regular(path)
    with file:
        if most is None or size <= most:
            return file.readall()
    raise _refused(path, f"its {size} bytes are more than {most}, the most that are read")


def read_text(path: _Path) -> str:
    """Return the text of a regular file in UTF-8, without byte order mark; see `read_regular`."""
    try:
        return read_regular(path).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _refused(path, f"it is not UTF-8 (byte {error.start + 1})") from None
