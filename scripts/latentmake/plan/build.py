"""A build of this folder: its locks, what others see of it, and where it may write.

Three files tell of a build, each as long as a process holds it locked, however that ends:
`building.lock` is shared by commands that may build and held alone by one that deletes or writes
their files; `jobs.lock` is held until the jobs of a build have ended, those of a killed one too;
`builds/*.json` say what a build makes, for `latentmake status` and for other builds.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import socket
import sys
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, BinaryIO

from pydantic import BaseModel, Field

from latentmake.digest import TargetStat, target_stat
from latentmake.errors import StorageError
from latentmake.files import atomic
from latentmake.files.signals import signals_call
from latentmake.files.state_file import read_state
from latentmake.files.watchdog import Watchdog
from latentmake.plan import store
from latentmake.plan.orders import FOLDER, KEPT_SECONDS, RUNS, Order
from latentmake.plan.receipts import made_by, restore_times

BUILDS = Path(".latentmake/builds")
_LOCK = Path(".latentmake/building.lock")
_JOBS = Path(".latentmake/jobs.lock")
_SNAKEMAKE = Path(".snakemake/locks")
_INCOMPLETE = Path(".snakemake/incomplete")
_CLUSTER = "cluster"
_GRACE = 30.0  # seconds; a job gives a training 20


class Build:
    """A command that may build, from before Snakemake locks the folder until its process ends.

    Attributes:
        orders: those that it carries out.

    Args:
        cluster: whether its jobs run elsewhere, and go on when it is killed.
    """

    def __init__(self, *, cluster: bool) -> None:
        self.orders: Sequence[Order] = ()
        self._before: list[tuple[str, TargetStat]] = []
        self._declares = False
        self._ends = contextlib.ExitStack()
        self._machine = _CLUSTER if cluster else socket.gethostname()
        self._held: BinaryIO | None = None
        with contextlib.suppress(OSError):  # a file system without locks: `--unlock` is the user's
            self._held = held = _LOCK.open("ab")
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                with _JOBS.open("ab") as jobs:
                    fcntl.flock(jobs, fcntl.LOCK_EX)  # a moment: its watchdog ends them
                _unlock(self._machine)
                # What bears its name is whole, also where its job outlived a Snakemake that was
                # killed; by this record that job would run again, without an order.
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
                # Snakemake removes it with its locks.
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
        """Tell others of the build and its trainings, and keep what its jobs will replace.

        Snakemake touches `results` and, if the graph `declares` them, cache files: `end` gives them
        back their times.

        Raises:
            StorageError: a running build makes some of the same files.
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
        """Let none of the jobs outlive this process; pass on the signals that end it."""
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
            # Jobs pass it on to what has a group of its own. A terminal's Ctrl-C has reached them:
            # the first one counts.
            watchdog.signal(signal.SIGTERM, group=os.getpgrp())
            raise KeyboardInterrupt

        self._ends.enter_context(signals_call(interrupt))
        self._ends.callback(watchdog.close, _GRACE)  # signals still reach jobs while it waits

    def end(self, keep: int | None) -> None:
        """Wait for the jobs; after a successful build, limit the store to `keep` bytes.

        A build that failed (None), or beside which another one runs, leaves all as it is.
        """
        self._ends.close()
        restore_times([*self._before, *made_by(self.orders if self._declares else ())])
        if keep is None or self._held is None:
            return
        with contextlib.suppress(OSError):  # files left behind cost space, no more
            # Only here: to take it alone, flock gives up the shared one first, and whoever comes
            # between would remove the locks that Snakemake holds for this build.
            fcntl.flock(self._held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            keep_orders, oldest = {x.name for x in self.orders}, time.time() - KEPT_SECONDS
            for path in [*FOLDER.glob("*"), *RUNS.glob("*")]:  # the next plan reads receipts
                is_half = path.name.endswith(atomic.TEMPORARY_SUFFIX)  # of a job that was killed
                with contextlib.suppress(OSError):
                    is_old = path.stat().st_mtime < oldest
                    if is_half or (is_old and path.name.split(".")[0] not in keep_orders):
                        path.unlink()
            store.forget_made(self.orders)
            store.limit(keep)


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Keep builds of this folder out, as a command does that deletes or writes their files.

    Raises:
        StorageError: a build runs here.
    """
    hint = "wait until it ends, then run the same command"
    for _, about in running():
        raise StorageError(f"a build is running here ({_asked(about)})", hint=hint)
    with contextlib.ExitStack() as held:
        with contextlib.suppress(OSError):
            _LOCK.parent.mkdir(parents=True, exist_ok=True)
            try:
                fcntl.flock(held.enter_context(_LOCK.open("ab")), fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise StorageError("another build is running here", hint=hint) from None
        yield


def _unlock(machine: str) -> None:
    """Remove Snakemake's locks, unless another machine or a cluster's build may have taken one.

    Another machine may know nothing of our locks. With them go files that were half written; those
    of the cache are removed with its orphans.
    """
    locks = [*_SNAKEMAKE.glob("*.lock")]
    machines = [each.stem for each in _SNAKEMAKE.glob("*.machine")]
    if not locks or machines != [machine] or machine == _CLUSTER:
        return
    for each in locks:
        each.unlink()
    folders = (Path("runs"), Path("reports"), FOLDER)
    for left in (each for folder in folders for each in folder.rglob(".*")):
        if left.name.endswith(atomic.TEMPORARY_SUFFIX) and left.is_file():
            left.unlink(missing_ok=True)
    sys.stderr.write("note: a build was killed here; its lock of this folder is removed\n")


# -- running builds -------------------------------------------------------------------------------


def announce(
    orders: Iterable[Order], trained: Sequence[str], targets: Sequence[str]
) -> BinaryIO | None:
    """Note what a build makes, and the runs that it trains; return a file to hold until it ends.

    Raises:
        StorageError: a running build makes some of it. Snakemake knows by its locks, but each
            Snakemake that ends deletes the locks of all.
    """
    made = [order.name for order in orders]
    if not made and not trained:
        return None
    for path, other in running(forget=True):
        if {*made} & {*other["orders"]} or {*trained} & {*other["trained"]}:
            what = f"another build makes some of these files ({_asked(other)})"
            raise StorageError(what, where=path, hint="wait until it ends")
    about = {"process": os.getpid(), "targets": [*targets], "began": time.time()}
    with contextlib.suppress(OSError):
        with atomic.replacing(BUILDS / f"{time.time_ns()}.{os.getpid()}.json") as new:
            held = new.open("wb")  # locked before it has its name
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            held.write(json.dumps(about | {"orders": made, "trained": trained}).encode())
            held.flush()
        return held
    return None


def running(*, forget: bool = False) -> list[tuple[Path, dict[str, Any]]]:
    """Return the notes of builds that run (see `announce`); `forget` deletes those of others."""
    found = []
    for path in sorted(BUILDS.glob("*.json")):
        with contextlib.suppress(OSError), path.open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                if note := read_state(path, _Note.model_validate_json):
                    found.append((path, note.model_dump()))
            else:
                if forget:
                    path.unlink()
    return found


class _Note(BaseModel):
    process: int
    targets: list[str]
    began: Annotated[float, Field(ge=0, le=1e12)]
    orders: list[str]
    trained: list[str]


def locked() -> StorageError:
    """Return the error for a folder that another build has locked, as Snakemake found it."""
    for _, about in running():
        what = f"another build makes some of these files ({_asked(about)})"
        return StorageError(what, hint="wait until it ends")
    hint = "wait until it ends; if none runs on any machine, run the command with --unlock first"
    return StorageError("another build has locked this folder", where=Path.cwd(), hint=hint)


def _asked(about: Mapping[str, Any]) -> str:
    return f"{' '.join(about['targets']) or 'all'}, process {about['process']}"
