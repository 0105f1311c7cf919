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
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from latentmake.errors import ConfigError, StorageError, storage_error
from latentmake.files import atomic
from latentmake.files.disk import device_of
from latentmake.files.watchdog import Watchdog, signals_call
from latentmake.plan import store
from latentmake.plan.orders import FOLDER, KEPT_SECONDS, RUNS, Order
from latentmake.plan.state import PartState
from latentmake.plan.target import PROMPTS, Target
from latentmake.plan.targets import is_training_asked

BUILDS = Path(".latentmake/builds")
_LOCK = Path(".latentmake/building.lock")
_JOBS = Path(".latentmake/jobs.lock")
_SNAKEMAKE = Path(".snakemake/locks")
_CLUSTER = "cluster"
_GRACE = 20.0  # seconds; a job gives a trainer 10

OWNER = ".latentmake-owner"
"""Note of the project that owns a cache folder which lies outside of it."""
ADOPTED = "adopted.tsv"
"""Record of adopted files, in the cache folder of a dataset's model."""

_LOGS = ("captions", "clips", "evaluate", "export", "generate", "latents", "manifest")
_WRITTEN = ("logs", ".latentmake", ".snakemake")
_FOLDERS = (*_WRITTEN, *(f"logs/{each}" for each in (*_LOGS, "publish", "report", "text", "train")))


class Build:
    """A command that may build, from before Snakemake locks the folder until its process ends.

    Attributes:
        orders: those that it carries out.

    Args:
        cluster: whether its jobs run elsewhere, and go on when it is killed.
    """

    def __init__(self, *, cluster: bool) -> None:
        self.orders: Sequence[Order] = ()
        self._ends = contextlib.ExitStack()
        self._machine = _CLUSTER if cluster else socket.gethostname()
        self._held: BinaryIO | None = None
        with contextlib.suppress(OSError):  # a file system without locks: `--unlock` is the user's
            self._held = _LOCK.open("ab")
            self._enter(self._held)

    def _enter(self, held: BinaryIO) -> None:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with _JOBS.open("ab") as jobs:
                fcntl.flock(jobs, fcntl.LOCK_EX)  # a moment: its watchdog ends them
            _unlock(self._machine)
            store.take_spool()
        try:
            fcntl.flock(held, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            sys.stderr.write("note: waiting for another command that works in this folder\n")
            fcntl.flock(held, fcntl.LOCK_SH)
        if any(_SNAKEMAKE.glob("*.machine")) or not any(_SNAKEMAKE.glob("*.lock")):
            _SNAKEMAKE.mkdir(parents=True, exist_ok=True)
            (_SNAKEMAKE / f"{self._machine}.machine").touch()  # Snakemake removes it with its locks

    def begin(self, orders: Sequence[Order], runs: Iterable[str], targets: Sequence[str]) -> None:
        """Tell others of the build, and keep what its jobs will replace; called before any job.

        Raises:
            StorageError: a running build makes some of the same files.
        """
        self.orders = orders
        if (note := announce(orders, runs, targets)) is not None:
            self._ends.callback(note.close)
        if self._machine != _CLUSTER:
            self._watch()
        store.keep(orders)

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
        if keep is None or self._held is None:
            return
        with contextlib.suppress(OSError):  # files left behind cost space, no more
            # Only here: to take it alone, flock gives up the shared one first, and whoever comes
            # between would remove the locks that Snakemake holds for this build.
            fcntl.flock(self._held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _forget_orders({order.name for order in self.orders})
            store.forget_made(self.orders)
            store.limit(keep)


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Keep builds of this folder out, as a command does that deletes or writes their files.

    Raises:
        StorageError: a build runs here.
    """
    for _, about in _running():
        what = f"a build is running here ({_asked(about)})"
        raise StorageError(what, hint="wait until it ends, then run the same command")
    with contextlib.ExitStack() as held:
        with contextlib.suppress(OSError):
            _LOCK.parent.mkdir(parents=True, exist_ok=True)
            try:
                fcntl.flock(held.enter_context(_LOCK.open("ab")), fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                what = "another build is running here"
                raise StorageError(what, hint="wait until it ends") from None
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
    for left in (each for folder in ("runs", "reports") for each in Path(folder).rglob(".*")):
        if left.name.endswith(atomic.TEMPORARY_SUFFIX) and left.is_file():
            left.unlink(missing_ok=True)
    sys.stderr.write("note: a build was killed here; its lock of this folder is removed\n")


def _forget_orders(keep: set[str]) -> None:
    """Delete orders and receipts of a week ago, but for some orders: the next plan reads them."""
    oldest = time.time() - KEPT_SECONDS
    for path in [*FOLDER.glob("*"), *RUNS.glob("*")]:
        with contextlib.suppress(OSError):
            if path.name.split(".")[0] not in keep and path.stat().st_mtime < oldest:
                path.unlink()


# -- running builds -------------------------------------------------------------------------------


def announce(
    orders: Iterable[Order], runs: Iterable[str], targets: Sequence[str]
) -> BinaryIO | None:
    """Note what a build makes and trains, if anything; return a file to hold until it ends.

    Raises:
        StorageError: a running build makes some of it. Snakemake knows by its locks, but each
            Snakemake that ends deletes the locks of all.
    """
    made = [order.name for order in orders]
    trained = [run for run in runs if is_training_asked(run, targets)]
    if not made and not trained:
        return None
    for path, other in _running(forget=True):
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


def running_builds() -> list[dict[str, Any]]:
    """Return each build that runs here, and how far it is by what lies on the disk.

    Returns:
        `process` (its id, on its machine), `targets` (of its command line; none stand for all),
        `began` (seconds since 1970), `made` (`latents tiny` -> number of targets made and to make),
        `training` (run -> the last line of its log; "" before it has one).
    """
    found = []
    for _, about in _running():
        began, made = about["began"], dict[str, tuple[int, int]]()
        for name in about.pop("orders"):
            with contextlib.suppress(OSError, ValueError):
                order = Order.read(FOLDER / f"{name}.json")
                done, total = made.get(order.work, (0, 0))
                targets = [target for item in order.items for target in item.targets]
                made[order.work] = done + sum(map(_is_made, targets)), total + len(targets)
        logs = {run: Path(f"logs/train/{run}.log") for run in about.pop("trained")}
        training = {run: _last_line(log, began) for run, log in logs.items()}
        found.append(about | {"made": made, "training": training})
    return found


def _running(*, forget: bool = False) -> list[tuple[Path, dict[str, Any]]]:
    """Return the notes of builds that run; `forget` deletes those of others."""
    found = []
    for path in sorted(BUILDS.glob("*.json")):
        with contextlib.suppress(OSError, ValueError), path.open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                found.append((path, json.loads(file.read())))
            else:
                if forget:
                    path.unlink()
    return found


def _asked(about: Mapping[str, Any]) -> str:
    return f"{' '.join(about['targets']) or 'all'}, process {about['process']}"


def _is_made(target: Target) -> bool:
    """Whether a target is no longer what the plan found."""
    with contextlib.suppress(OSError):
        moment = str(os.lstat(target.path).st_mtime_ns)
        return target.found is None or target.found.rpartition("@")[2] != moment
    return False


def _last_line(log: Path, began: float) -> str:
    """Return the last line of a log that was written since a build began; of a bar as it is now."""
    with contextlib.suppress(OSError):
        if log.stat().st_mtime >= began - 1:  # another machine may have another clock
            text = log.read_text(errors="replace").replace("\r", "\n")
            return text.rstrip().rpartition("\n")[2].strip()
    return ""


# -- folders --------------------------------------------------------------------------------------


def check_folder(home: Path, *, dry: bool) -> None:
    """Refuse a working folder, or a folder of the Snakefile (`home`), that Snakemake cannot use."""
    if set("{}") & set(str(home)):
        raise ConfigError(
            "Snakemake cannot read a Snakefile in a folder with braces in its path",
            where=home,
            hint="rename the folder; those of datasets and models may have braces",
        )
    for place in (home, Path.cwd()):
        if str(place).encode(errors="replace") != os.fsencode(place):
            raise ConfigError(
                "Snakemake cannot write the name of this folder, which is not UTF-8",
                where=place,
                hint="rename the folder, or the one above it; caches stay fresh",
            )
    for name in _FOLDERS:
        _refuse_file(Path(name))
    snakemake = Path(".snakemake")
    if dry and snakemake.is_dir() and not os.access(snakemake, os.W_OK | os.X_OK):
        raise StorageError(  # a dry run makes folders there too
            "no permission to write", where=snakemake, hint="give your user the right to write"
        )
    for name in () if dry else _WRITTEN:
        _try_to_write(Path(name))
    # That of PuLP, with which Snakemake chooses jobs; Python's own falls back on other folders.
    temporary = Path(os.environ.get("TMP", os.environ.get("TMPDIR", "/tmp")))  # noqa: S108
    if not dry and os.access(temporary, os.W_OK | os.X_OK):
        _try_to_write(temporary, "set TMPDIR to another folder, or ")


def check_run_folder(folder: Path) -> None:
    """Refuse a run's folder that is none, or that cannot be written."""
    place = next(each for each in (folder, *folder.parents) if os.path.lexists(each))
    _refuse_file(place)
    if not os.access(place, os.W_OK | os.X_OK):
        hint = "give your user the right to write there, or mount it for writing"
        raise StorageError("this folder cannot be written", where=place, hint=hint)


def _refuse_file(path: Path) -> None:
    if os.path.lexists(path) and not path.is_dir():
        what = "a file is in the place of a folder"
        raise StorageError(what, where=path, hint="remove the file, or rename it")


def _try_to_write(folder: Path, remedy: str = "") -> None:
    """Write an unnamed file, to find a full disk before any job does."""
    try:
        folder.mkdir(exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(1 << 16))  # some room for Snakemake's log and locks
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        fault = storage_error(error, folder) or StorageError(
            f"cannot be written: {error.strerror}", where=folder, hint="check the folder"
        )
        raise StorageError(fault.what, where=folder, hint=remedy + fault.hint) from None


# -- shared cache folders -------------------------------------------------------------------------


def other_owner(dataset: str) -> Path | None:
    """Return the project that owns the caches of a dataset; None if it is this one, or gone.

    A folder inside of a project is its own. Where `cache`, or the folder of a dataset, is a link or
    a mount, the first project that builds there notes its path in a file. A project that was moved,
    copied or deleted has no such folder any more, or another one, so that its note counts for
    nothing.
    """
    folder = Path("cache", dataset)
    noted = _noted(folder)
    place = noted or Path(os.path.realpath(folder))
    project = place.parent.parent
    try:
        if not place.samefile(folder) or project.samefile("."):
            return None
    except PermissionError:
        return project  # another user's
    except (OSError, ValueError):
        return None
    builds = any((project / each).exists() for each in (".latentmake", ".snakemake", "runs"))
    return project if noted or builds else None


def claim(datasets: Iterable[str]) -> None:
    """Note this project as the owner of the caches of some datasets that lie outside of it."""
    for dataset in datasets:
        folder = Path("cache", dataset)
        mine = Path.cwd() / folder
        with contextlib.suppress(OSError, StorageError):  # it cannot be written
            outside = os.path.realpath(folder) != str(mine) or device_of(folder) != device_of(".")
            if outside and _noted(folder) != mine and other_owner(dataset) is None:
                atomic.write(folder / OWNER, os.fsencode(mine))


def refuse_other_items(dataset: str, parts: Iterable[PartState]) -> None:
    """Refuse to work on another project's caches, unless both have the same items.

    Prompts are named by their content: those of the other project stay.

    Raises:
        ConfigError: this build would remove or replace some of them, or the other's would do so.
    """
    touched = [part for part in parts if part.orphans or part.stale]
    project = other_owner(dataset) if touched else None
    if project is None:
        return
    count = 0
    for part in touched:
        whole = {each for each in part.orphans if not each.endswith(atomic.TEMPORARY_SUFFIX)}
        # The other project may be writing the half ones just now.
        part.orphans = sorted(whole) if dataset != PROMPTS else []
        replaced = [each for each in part.stale if each.target.found is not None or part.fresh > 0]
        count += len(part.orphans) + sum(each.reason != "damaged" for each in replaced)
    if count and dataset != PROMPTS:
        raise ConfigError(
            f"the project {project} uses this folder too, and its items are not those of "
            f"{Path.cwd()}: {count} cache files differ",
            where=f"cache/{dataset}",
            hint="rename the dataset in one of them (equal files are linked), make `cache` a "
            "folder of this project, or build there first if the items are meant to be the same",
        )


def _noted(folder: Path) -> Path | None:
    with contextlib.suppress(OSError):
        return Path(os.fsdecode((folder / OWNER).read_bytes()))
    return None
