"""Watchdog: a process that ends what another one has started, once that one has ended.

It does so however the other ended, also by SIGKILL. What a process has started, and what that has
started in turn, carries a word in its environment; launchers that begin sessions of their own, or
die before those that they launched, keep nobody from being found.
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
"""Environment variable: the words of all watchdogs over a process."""

_POLL_MILLISECONDS = 1000


class Watchdog(AbstractContextManager["Watchdog"]):
    """A watchdog over all processes that have its `environment`, until it is closed.

    Attributes:
        environment: the variable that what is watched has in its environment.

    Args:
        files: open files that it holds until those processes have ended: locks.
    """

    def __init__(self, files: Sequence[int] = ()) -> None:
        self._word = f"{os.getpid()}-{time.time_ns()}"
        words = f"{os.environ.get(VARIABLE, '')} {self._word}"
        self.environment = {VARIABLE: words.strip()}
        path = [str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH")]
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", __name__, self._word, str(os.getpid())],
            # Not watched itself, and of another session: what ends the others does not end it.
            env={**os.environ, VARIABLE: "", "PYTHONPATH": os.pathsep.join(filter(None, path))},
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=tuple(files),
            start_new_session=True,
        )

    def signal(self, number: int, *, group: int | None = None) -> None:
        """Send a signal to those that are watched, or to those of them in a process group."""
        for each in _watched(self._word):
            with suppress(OSError):
                if group is None or os.getpgid(each.pid) == group:
                    os.kill(each.pid, number)

    def close(self, grace: float = 0.0) -> None:
        """Wait some seconds for those that are watched, kill who is left, and end."""
        deadline = time.monotonic() + grace
        while time.monotonic() < deadline and _watched(self._word):
            time.sleep(0.05)
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def __exit__(self, *_: object) -> None:
        self.close()


def _watched(word: str) -> list[psutil.Process]:
    import psutil  # not needed while planning

    found = []
    for each in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if word in each.environ().get(VARIABLE, "").split():
                found.append(each)
    return found


def _watch(word: str, parent: int) -> None:
    """Wait for the end of a process, or until it closes our stdin; then kill those watched."""
    import psutil

    closed = select.poll()
    closed.register(0, select.POLLIN | select.POLLHUP)
    # What the other process has forked may hold the pipe open for longer than it lives.
    while os.getppid() == parent and not closed.poll(_POLL_MILLISECONDS):
        pass
    while found := _watched(word):
        for each in found:
            with suppress(psutil.Error):
                each.kill()
        psutil.wait_procs(found, timeout=1)


if __name__ == "__main__":
    _watch(sys.argv[1], int(sys.argv[2]))
