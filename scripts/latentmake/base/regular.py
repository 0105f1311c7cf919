"""Regular files: the only module that opens files which users name.

A path in a configuration, a list or a command line may lead to a folder, to a pipe that never sends
anything, to a device that never ends, or to a file that is larger than the memory. This module
raises an OSError in all these cases, as for a missing file, so that callers can name the key.
"""

from __future__ import annotations

import errno
import os
from io import FileIO
from stat import S_ISREG

_MOST = 1 << 26  # most bytes of a file that is read at once, unless the caller sets another limit
_NO_FILE = "it is no regular file"

_Path = str | os.PathLike[str]


def open_regular(path: _Path) -> tuple[FileIO, int]:
    """Open a regular file for reading, unbuffered and without waiting; return it and its size.

    Raises:
        OSError: the file cannot be opened, or is a folder, a pipe, a socket or a device.
    """
    try:
        file = FileIO(path, opener=_without_waiting)
    except ValueError:  # the name has a NUL, or half a character
        raise _refused(path, "no file can have this name") from None
    except OSError as error:
        if error.errno != errno.ENXIO:  # the path is a socket
            raise
        raise _refused(path, _NO_FILE) from None
    stat = os.fstat(file.fileno())
    if not S_ISREG(stat.st_mode):
        file.close()
        raise _refused(path, _NO_FILE)
    return file, stat.st_size


def _without_waiting(path: str, flags: int) -> int:
    # Otherwise opening a pipe would wait until another process opens it for writing.
    return os.open(path, flags | os.O_NONBLOCK)


def _refused(path: _Path, what: str) -> OSError:
    return OSError(errno.EINVAL, what, os.fspath(path))


def read_regular(path: _Path, most: int | None = _MOST) -> bytes:
    """Return the content of a regular file; raises OSError if it is another kind or too large."""
    file, size = open_regular(path)
    with file:
        if most is None or size <= most:
            return file.readall()
    raise _refused(path, f"its {size} bytes are more than {most}, the most that are read")


def read_text(path: _Path) -> str:
    """Return the UTF-8 text of a regular file without its byte order mark; see `read_regular`."""
    try:
        return read_regular(path).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _refused(path, f"it is not UTF-8 (byte {error.start + 1})") from None
