"""Watchdog: a process that kills the descendants of another process when that process ends.

It works however the other process ends, even by SIGKILL. Descendants inherit a word in an
environment variable. So the watchdog finds them even if a launcher starts them in another session,
or ends before them.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import psutil

VARIABLE = "LATENTMAKE_STARTED_BY"
"""Environment variable with the words of all watchdogs that watch a process."""

_POLL_MILLISECONDS = 1000


class Watchdog(AbstractContextManager["Watchdog"]):
    """Watches all processes that have its variable in their environment, until it is closed.

    Attributes:
        environment: variable to add to the environment of a child process.

    Args:
        files: descriptors of open lock files, which it holds until those processes have ended.
    """

    def __init__(self, files: Sequence[int] = ()) -> None:
        self._word = f"{os.getpid()}-{time.time_ns()}"
        words = f"{os.environ.get(VARIABLE, '')} {self._word}"
        self.environment = {VARIABLE: words.strip()}
        path = [str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH")]
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", __name__, self._word, str(os.getpid())],
            # It is not watched itself and has its own session, so it survives the signals that end
            # the other processes.
            env={**os.environ, VARIABLE: "", "PYTHONPATH": os.pathsep.join(filter(None, path))},
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=tuple(files),
            start_new_session=True,
        )

    def signal(self, number: int, *, group: int | None = None) -> None:
        """Send a signal to the watched processes, or only to those of a process group."""
        for process in _watched(self._word):
            with suppress(OSError):
                if group is None or os.getpgid(process.pid) == group:
                    os.kill(process.pid, number)

    def close(self, grace: float = 0.0) -> None:
        """Wait `grace` seconds for the watched processes, then kill the remaining ones, and end."""
        deadline = time.monotonic() + grace
        while time.monotonic() < deadline and _watched(self._word):
            time.sleep(0.05)
        assert self._process.stdin is not None
        self._process.stdin.close()  # the watchdog then kills the processes, and ends
        self._process.wait()

    def __exit__(self, *_: object) -> None:
        self.close()


def _watched(word: str) -> list[psutil.Process]:
    import psutil  # imported late: planning does not need it

    processes = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if word in process.environ().get(VARIABLE, "").split():
                processes.append(process)
    return processes


def _watch(word: str, parent: int) -> None:
    """Wait until a process ends or closes our stdin, then kill the watched processes."""
    import psutil

    closed = select.poll()
    closed.register(0, select.POLLIN | select.POLLHUP)
    # The pipe does not suffice: a child that the parent forked may keep it open after its end.
    while os.getppid() == parent and not closed.poll(_POLL_MILLISECONDS):
        pass
    while processes := _watched(word):  # again, because they may start others meanwhile
        for process in processes:
            with suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(processes, timeout=1)


if __name__ == "__main__":
    _watch(sys.argv[1], int(sys.argv[2]))
