"""Lock files that a process holds until it ends, however it ends (`flock`).

The processes that it starts with `inherited()` hold them as well: a lock is free when all have
ended.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
from pathlib import Path
from typing import BinaryIO

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
