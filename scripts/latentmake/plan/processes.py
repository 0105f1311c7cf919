"""Processes of a build: none outlives it, and what a killed one has left is cleared away."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import socket
import sys
from pathlib import Path
from typing import BinaryIO

from latentmake.files.atomic import TEMPORARY_SUFFIX
from latentmake.files.watchdog import Watchdog, signals_call

_COMMAND = Path(".latentmake/command.lock")  # held by each command while it lives
_JOBS = Path(".latentmake/jobs.lock")  # held while a build has jobs, also one that was killed
_LOCKS = Path(".snakemake/locks")
_FOLDERS = (Path("runs"), Path("reports"))
_CLUSTER = "cluster"
_GRACE = 20.0  # seconds; a job gives a trainer 10


def enter(*, cluster: bool) -> BinaryIO | None:
    """Note that a command works here, before Snakemake locks; return a file to hold until it ends.

    Where no other command works here, Snakemake's locks are those of one that was killed, and are
    removed: if they were taken on this machine, for another one may know nothing of our locks, and
    by no build on a cluster, whose jobs go on.
    """
    machine = _CLUSTER if cluster else socket.gethostname()
    held = None
    with contextlib.suppress(OSError):  # a file system without locks: `--unlock` is the user's
        held = _COMMAND.open("ab")
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with _JOBS.open("ab") as jobs:
                fcntl.flock(jobs, fcntl.LOCK_EX)  # a moment: its watchdog ends them
            _unlock(machine)
        fcntl.flock(held, fcntl.LOCK_SH)
        if any(_LOCKS.glob("*.machine")) or not any(_LOCKS.glob("*.lock")):
            _LOCKS.mkdir(parents=True, exist_ok=True)
            (_LOCKS / f"{machine}.machine").touch()  # Snakemake removes it with its locks
    return held


def _unlock(machine: str) -> None:
    """Remove Snakemake's locks, unless another machine may have taken one.

    With them go files that were half written; those of the cache are removed with its orphans.
    """
    locks = [*_LOCKS.glob("*.lock")]
    if locks and [each.stem for each in _LOCKS.glob("*.machine")] == [machine] != [_CLUSTER]:
        for each in locks:
            each.unlink()
        for left in (each for folder in _FOLDERS for each in folder.rglob(".*")):
            if left.name.endswith(TEMPORARY_SUFFIX) and left.is_file():
                left.unlink(missing_ok=True)
        sys.stderr.write("note: a build was killed here; its lock of this folder is removed\n")


class Jobs:
    """All that a build on this machine starts, until it has ended.

    A signal that ends the build reaches its jobs as well, as Ctrl-C does. A second Ctrl-C kills
    them.
    """

    def __init__(self) -> None:
        with contextlib.ExitStack() as until_watched:
            held = []
            with contextlib.suppress(OSError):
                file = until_watched.enter_context(_JOBS.open("ab"))
                fcntl.flock(file, fcntl.LOCK_SH)
                held = [file.fileno()]
            self._watchdog = Watchdog(held)
        os.environ.update(self._watchdog.environment)
        self._signals = contextlib.ExitStack()
        self._signals.enter_context(signals_call(self._interrupt))

    def _interrupt(self, _number: int) -> None:
        signal.signal(signal.SIGINT, lambda *_: self._watchdog.signal(signal.SIGKILL))
        # Jobs pass it on to what has a group of its own. A terminal's Ctrl-C has reached them:
        # the first one counts.
        self._watchdog.signal(signal.SIGTERM, group=os.getpgrp())
        raise KeyboardInterrupt

    def end(self) -> None:
        """Wait until all of them have ended, and kill who does not."""
        self._watchdog.close(_GRACE)
        self._signals.close()
