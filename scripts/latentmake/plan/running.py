"""Running builds of this folder and their progress, for other processes.

A build leaves a file that it holds locked until its process ends, however it ends. Progress is what
lies on the disk: receipts, and targets that are no longer what its orders found.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from latentmake.errors import StorageError
from latentmake.files import atomic
from latentmake.plan.orders import FOLDER, Order
from latentmake.plan.targets import is_training_asked
from latentmake.progress import duration

BUILDS = Path(".latentmake/builds")


@dataclass(frozen=True)
class BuildProgress:
    """Progress of a running build.

    Attributes:
        process: its id, on its machine.
        targets: of its command line; none stand for everything.
        began: seconds since 1970.
        made: work (`latents tiny`) -> number of targets made, and of those that it is to make.
        training: run -> the last line of its training's log; "" before it has one.
    """

    process: int
    targets: list[str]
    began: float
    made: dict[str, tuple[int, int]] = field(default_factory=dict)
    training: dict[str, str] = field(default_factory=dict)

    def lines(self) -> Iterator[str]:
        """Yield it in words."""
        asked = " ".join(self.targets) or "all"
        since = duration(max(0.0, time.time() - self.began) / 60)
        yield f"a build runs: {asked} (process {self.process}), for {since}"
        for work, (made, total) in self.made.items():
            yield f"  {' of '.join(work.split(' ', 1))}: {made} of {total} targets made"
        for run, line in self.training.items():
            yield f"  training of {run}: {line or 'not begun'}"


def announce(
    orders: Iterable[Order], runs: Iterable[str], targets: Sequence[str]
) -> BinaryIO | None:
    """Note the begin of a build for other processes; return a file to hold until it ends.

    Args:
        orders: work orders that it carries out.
        runs: names of the runs that it planned.
        targets: of the command line.

    Returns:
        None where it makes neither caches nor trainings, or no file can be written or locked.

    Raises:
        StorageError: a running build makes some of it. Snakemake knows by its locks, but each
            Snakemake that ends, that of a status too, deletes the locks of all.
    """
    made = [order.name for order in orders]
    trained = [run for run in runs if is_training_asked(run, targets)]
    if not made and not trained:
        return None
    for path, other in _running(forget=True):
        same = {*made} & {*other["orders"]} or {*trained} & {*other["trained"]}
        if same:
            asked = " ".join(other["targets"]) or "all"
            what = f"another build makes some of these files ({asked}, process {other['process']})"
            raise StorageError(what, where=str(path), hint="wait until it ends")
    about = {"process": os.getpid(), "targets": [*targets], "began": time.time()}
    path = BUILDS / f"{time.time_ns()}.{os.getpid()}.json"
    with contextlib.suppress(OSError):
        with atomic.replacing(path) as new:  # locked before it has its name
            held = new.open("wb")
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            held.write(json.dumps(about | {"orders": made, "trained": trained}).encode())
            held.flush()
        return held
    return None


def running_builds() -> list[BuildProgress]:
    """Return the progress of each build that runs here."""
    found = []
    for _, about in _running():
        with contextlib.suppress(ValueError, LookupError):
            found.append(_progress(about))
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


def _progress(about: dict[str, Any]) -> BuildProgress:
    began = float(about["began"])
    made: dict[str, tuple[int, int]] = {}
    for name in about["orders"]:
        with contextlib.suppress(OSError, ValueError):
            order = Order.read(FOLDER / f"{name}.json")
            before = made.get(order.work, (0, 0))
            made[order.work] = before[0] + _made(order, began), before[1] + len(order.paths)
    training = {run: _last_line(Path(f"logs/train/{run}.log"), began) for run in about["trained"]}
    return BuildProgress(int(about["process"]), about["targets"], began, made, training)


def _made(order: Order, began: float) -> int:
    """Return how many targets of an order are made."""
    with contextlib.suppress(OSError):
        if order.receipt.stat().st_mtime >= began - 1:  # another machine may have another clock
            return len(order.paths)
    return sum(
        _is_made(target.path, target.found) for item in order.items for target in item.targets
    )


def _is_made(path: str, found: str | None) -> bool:
    try:
        moment = str(os.lstat(path).st_mtime_ns)
    except OSError:
        return False
    return found is None or found.rpartition("@")[2] != moment


def _last_line(log: Path, began: float) -> str:
    """Return the last line of a log that was written since a build began; of a bar as it is now."""
    with contextlib.suppress(OSError), log.open("rb") as file:
        stat = os.fstat(file.fileno())
        if stat.st_mtime >= began - 1:
            file.seek(max(0, stat.st_size - 4096))
            text = file.read().decode(errors="replace").replace("\r", "\n")
            lines = [line.strip() for line in text.split("\n") if line.strip()]
            return lines[-1] if lines else ""
    return ""
