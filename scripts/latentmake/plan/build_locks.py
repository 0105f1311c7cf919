"""A build of this folder: its locks and its notes for other commands.

Three kinds of files show that a build runs. A file counts only while a process holds a lock on it,
so that a killed process leaves nothing behind:

- `building.lock`: commands that may build share this lock. A command that deletes or writes the
  files of builds holds it exclusively.
- `jobs.lock`: held until all jobs of a build have ended, even if the build was killed.
- `builds/*.json`: the orders and trainings of a build, for `latentmake status` and other builds.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import socket
import sys
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, BinaryIO

from pydantic import BaseModel, Field

from latentmake.base import atomic
from latentmake.base.digest import TargetStat, target_stat
from latentmake.base.errors import StorageError
from latentmake.base.state_file import read_state
from latentmake.plan import store
from latentmake.plan.orders import FOLDER, KEPT_SECONDS, RUNS, Order
from latentmake.plan.receipts import made_by, restore_times

BUILDS = Path(".latentmake/builds")
_LOCK = Path(".latentmake/building.lock")
_JOBS = Path(".latentmake/jobs.lock")
_SNAKEMAKE = Path(".snakemake/locks")
_INCOMPLETE = Path(".snakemake/incomplete")
_CLUSTER = "cluster"
_GRACE = 30.0  # seconds that jobs get to end; a job in turn gives its training 20


class Build:
    """A command that may build, from before Snakemake locks the folder until its process ends.

    Attributes:
        orders: orders that the build carries out.

    Args:
        cluster: whether jobs run on a cluster, where they go on if the build is killed.
    """

    def __init__(self, *, cluster: bool) -> None:
        self.orders: Sequence[Order] = ()
        self._before: list[tuple[str, TargetStat]] = []
        self._declares = False
        self._ends = contextlib.ExitStack()
        self._machine = _CLUSTER if cluster else socket.gethostname()
        self._held: BinaryIO | None = None
        # On a file system without locks, the user has to run `--unlock` after a killed build.
        with contextlib.suppress(OSError):
            self._held = held = _LOCK.open("ab")
            with contextlib.suppress(BlockingIOError):
                # With the exclusive lock, no other command works here: clean up after a killed one.
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                with _JOBS.open("ab") as jobs:
                    # This waits a moment, until the watchdog has ended the jobs.
                    fcntl.flock(jobs, fcntl.LOCK_EX)
                _unlock(self._machine)
                # Remove Snakemake's records of incomplete files: jobs rename files only when they
                # are complete, even if Snakemake was killed meanwhile. Because of such a record,
                # the job would run again, but without an order.
                for record in _INCOMPLETE.rglob("*"):
                    if record.is_file():
                        record.unlink()
            try:
                fcntl.flock(held, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                sys.stderr.write("note: waiting for another command that works in this folder\n")
                fcntl.flock(held, fcntl.LOCK_SH)
            if any(_SNAKEMAKE.glob("*.machine")) or not any(_SNAKEMAKE.glob("*.lock")):
                _SNAKEMAKE.mkdir(parents=True, exist_ok=True)
                # Snakemake removes this file together with its locks.
                (_SNAKEMAKE / f"{self._machine}.machine").touch()

    def begin(
        self,
        orders: Sequence[Order],
        runs: Sequence[str],
        targets: Sequence[str],
        results: Iterable[str] = (),
        *,
        declares: bool = False,
    ) -> None:
        """Announce the build and its trainings, and keep the files that its jobs will replace.

        Snakemake touches `results` and, if the graph `declares` them, cache files. `end` restores
        their times.

        Raises:
            StorageError: another running build makes some of the same files.
        """
        self.orders = orders
        if (note := announce(orders, runs, targets)) is not None:
            self._ends.callback(note.close)
        if self._machine != _CLUSTER:
            self._watch()
        store.keep(orders)
        self._declares = declares
        for path in results:
            with contextlib.suppress(OSError):
                self._before.append((path, target_stat(Path(path).stat())))

    def _watch(self) -> None:
        """Let no job outlive this process; pass the signals that end it on to the jobs."""
        # Only builds have jobs: other commands read notes.
        from latentmake.base.signals import signals_call
        from latentmake.base.watchdog import Watchdog

        with contextlib.ExitStack() as until_watched:
            held = []
            with contextlib.suppress(OSError):
                file = until_watched.enter_context(_JOBS.open("ab"))
                fcntl.flock(file, fcntl.LOCK_SH)
                held = [file.fileno()]
            watchdog = Watchdog(held)
        os.environ.update(watchdog.environment)

        def interrupt(_number: int) -> None:
            signal.signal(signal.SIGINT, lambda *_: watchdog.signal(signal.SIGKILL))
            # Python warns of Snakemake's jobs that were to begin.
            warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
            # Jobs pass the signal on to child processes in groups of their own. After Ctrl-C in a
            # terminal, jobs get two signals; they act on the first one only.
            watchdog.signal(signal.SIGTERM, group=os.getpgrp())
            raise KeyboardInterrupt

        self._ends.enter_context(signals_call(interrupt))
        self._ends.callback(watchdog.close, _GRACE)  # jobs still get signals while it waits

    def end(self, keep: int | None) -> None:
        """Wait for the jobs; after a successful build, limit the store to `keep` bytes.

        `keep` is None after a failed build. Then the store and old orders stay as they are, as they
        do while another build runs.
        """
        self._ends.close()
        restore_times([*self._before, *made_by(self.orders if self._declares else ())])
        if keep is None or self._held is None:
            return
        with contextlib.suppress(OSError):  # files left behind only cost disk space
            # Take the exclusive lock only here, at the end. To upgrade, flock first gives up the
            # shared lock. A build that starts in between would remove the locks that Snakemake
            # holds for this build.
            fcntl.flock(self._held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The files of this build stay: the next plan reads its receipts.
            keep_orders = {order.name for order in self.orders}
            oldest = time.time() - KEPT_SECONDS
            for path in [*FOLDER.glob("*"), *RUNS.glob("*")]:
                is_half = path.name.endswith(atomic.TEMPORARY_SUFFIX)  # a killed job left it
                with contextlib.suppress(OSError):
                    is_old = path.stat().st_mtime < oldest
                    if is_half or (is_old and path.name.split(".")[0] not in keep_orders):
                        path.unlink()
            store.forget_made(self.orders)
            store.limit(keep)


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Block builds of this folder while a command deletes or writes their files.

    Raises:
        StorageError: a build runs here.
    """
    hint = "wait until it ends, then run the same command"
    for _, note in running():
        raise StorageError(f"a build is running here ({note})", hint=hint)
    with contextlib.ExitStack() as held:
        with contextlib.suppress(OSError):
            _LOCK.parent.mkdir(parents=True, exist_ok=True)
            try:
                fcntl.flock(held.enter_context(_LOCK.open("ab")), fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise StorageError("another build is running here", hint=hint) from None
        yield


def _unlock(machine: str) -> None:
    """Remove Snakemake's locks, unless another machine or a cluster's build may hold one.

    Our own locks may not reach other machines. Partial files of results and orders are removed too.
    Partial files of the cache are removed with its orphans.
    """
    locks = [*_SNAKEMAKE.glob("*.lock")]
    machines = [file.stem for file in _SNAKEMAKE.glob("*.machine")]
    if not locks or machines != [machine] or machine == _CLUSTER:
        return
    for lock in locks:
        lock.unlink()
    folders = (Path("runs"), Path("reports"), FOLDER)
    for file in (file for folder in folders for file in folder.rglob(".*")):
        if file.name.endswith(atomic.TEMPORARY_SUFFIX) and file.is_file():
            file.unlink(missing_ok=True)
    sys.stderr.write("note: a build was killed here; its lock of this folder is removed\n")


# -- running builds -------------------------------------------------------------------------------


class Note(BaseModel):
    """Note of a running build."""

    process: int
    targets: Sequence[str]
    began: Annotated[float, Field(ge=0, le=1e12)]
    orders: list[str]
    trained: Sequence[str]

    def __str__(self) -> str:
        return f"{' '.join(self.targets) or 'all'}, process {self.process}"


def announce(
    orders: Iterable[Order], trained: Sequence[str], targets: Sequence[str]
) -> BinaryIO | None:
    """Write a note of a build's orders and trained runs; return it open and locked.

    The caller keeps the file open until the build ends. Snakemake's own locks are not enough: each
    Snakemake that ends deletes the locks of all.

    Raises:
        StorageError: a running build makes some of the same files.
    """
    made = [order.name for order in orders]
    if not made and not trained:
        return None
    for path, other in running(forget=True):
        if {*made} & {*other.orders} or {*trained} & {*other.trained}:
            what = f"another build makes some of these files ({other})"
            raise StorageError(what, where=path, hint="wait until it ends")
    note = Note(
        process=os.getpid(), targets=targets, began=time.time(), orders=made, trained=trained
    )
    with contextlib.suppress(OSError):
        with atomic.replacing(BUILDS / f"{time.time_ns()}.{os.getpid()}.json") as new:
            # Locked before it gets its name, so that no command takes it for an old note.
            held = new.open("wb")
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            held.write(note.model_dump_json().encode())
            held.flush()
        return held
    return None


def running(*, forget: bool = False) -> list[tuple[Path, Note]]:
    """Return the notes of running builds (see `announce`); `forget` deletes all other notes."""
    notes = []
    for path in sorted(BUILDS.glob("*.json")):
        with contextlib.suppress(OSError), path.open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                if note := read_state(path, Note.model_validate_json):
                    notes.append((path, note))
            else:  # nobody holds the lock: the build has ended
                if forget:
                    path.unlink()
    return notes


def locked() -> StorageError:
    """Return the error for a folder that Snakemake finds locked by another build."""
    for _, note in running():
        what = f"another build makes some of these files ({note})"
        return StorageError(what, hint="wait until it ends")
    hint = "wait until it ends; if none runs on any machine, run the command with --unlock first"
    return StorageError("another build has locked this folder", where=Path.cwd(), hint=hint)
