"""History of builds: a line of JSON for each build that made something.

It lies beside the memo, which can be deleted at any time: nothing but the report reads it.
"""

from __future__ import annotations

import contextlib
import json
import platform
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path

from latentmake import __version__
from latentmake.plan import running, spool
from latentmake.plan.orders import WorkOrder
from latentmake.plan.receipts import Receipt, read_receipt

__all__ = ["HISTORY", "Build", "RunningBuild", "read_history", "versions"]

HISTORY = Path(".latentmake/history.jsonl")
_PACKAGES = ("snakemake", "torch", "diffusers", "transformers")
_RESULTS = ("dataset.lock", "trained.json", "generated.json")  # of a run


@dataclass(frozen=True)
class Build:
    """One build that made something.

    Attributes:
        began: seconds since 1970.
        seconds: from the first job's start to the end.
        succeeded: whether no job failed.
        targets: of the command line; none stand for everything.
        made: `{dataset}/{model}/{part}` -> number of cache files.
        ways: number of targets `encoded`, `spooled`, `linked`, `kept`.
        work: kind and model -> targets encoded, seconds of the jobs, words on the bottleneck.
        results: manifests and trainings, by path.
        versions: package -> version.
    """

    began: float
    seconds: float
    succeeded: bool
    targets: list[str]
    made: dict[str, int] = field(default_factory=dict)
    ways: dict[str, int] = field(default_factory=dict)
    work: dict[str, tuple[int, float, str]] = field(default_factory=dict)
    results: list[str] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)


class RunningBuild:
    """A build from its begin, after Snakemake locked and before any job, to its end.

    Args:
        orders: work orders of its jobs.
        runs: names of the runs that it planned.
        targets: of the command line.
    """

    def __init__(
        self,
        orders: Sequence[WorkOrder],
        runs: Iterable[str],
        targets: Sequence[str],
    ) -> None:
        self._orders, self._runs, self._targets = orders, runs, targets
        self._began = time.time()
        self._held = spool.begin(orders)
        self._announced = running.announce(orders, runs, targets)

    def end(self, keep: int, *, succeeded: bool) -> None:
        """Add it to the history, and clean up if no job failed, before Snakemake unlocks.

        Args:
            keep: size of the store in bytes, at most.
            succeeded: whether no job failed.
        """
        if self._announced is not None:
            self._announced.close()
        _note(self._orders, self._runs, self._targets, self._began, succeeded=succeeded)
        if succeeded:
            spool.end(self._held, self._orders, keep)


def _note(
    orders: Iterable[WorkOrder],
    runs: Iterable[str],
    targets: Sequence[str],
    began: float,
    *,
    succeeded: bool,
) -> None:
    made: Counter[str] = Counter()
    ways: Counter[str] = Counter()
    work: dict[str, tuple[int, float, str]] = {}
    for order in orders:
        receipt = _receipt(order.receipt, began)
        if receipt is None:
            continue
        folder = f"{order.dataset}/{order.model}"
        made.update(
            f"{folder}/{target.part}"
            for item in order.items
            for target in item.targets
            if target.path in receipt.targets
        )
        ways.update(receipt.counts)
        count, seconds, words = work.get(order.work, (0, 0.0, ""))
        count += receipt.counts.get("encoded", 0)
        seconds = round(seconds + receipt.seconds, 3)
        work[order.work] = count, seconds, receipt.words or words
    results = [
        str(path)
        for run in runs
        for path in (Path("runs", run, name) for name in _RESULTS)
        if _is_since(path, began)
    ]
    if not (made or results):
        return
    build = Build(
        began=round(began, 3),
        seconds=round(time.time() - began, 3),
        succeeded=succeeded,
        targets=[*targets],
        made=dict(made),
        ways={way: count for way, count in ways.items() if count},
        work=work,
        results=results,
        versions=versions(),
    )
    with contextlib.suppress(OSError), HISTORY.open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(build), separators=(",", ":")) + "\n")


def _receipt(path: Path, began: float) -> Receipt | None:
    """Return a receipt written since a build began; None where there is none."""
    try:
        return read_receipt(path) if _is_since(path, began) else None
    except (OSError, ValueError):
        return None


def _is_since(path: Path, began: float) -> bool:
    with contextlib.suppress(OSError):
        return path.stat().st_mtime >= began - 1  # a network's file system may have another clock
    return False


def versions() -> dict[str, str]:
    """Return the versions of this package, Python and the packages that shape caches."""
    found = {"latentmake": __version__, "python": platform.python_version()}
    for name in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def read_history(path: Path = HISTORY, *, last: int | None = None) -> list[Build]:
    """Return the builds of a history, oldest first, or the `last` of them.

    Damaged lines are left out.
    """
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            lines = file.readlines()
    except OSError:
        return []
    found = []
    for line in lines[-last:] if last else lines:
        with contextlib.suppress(ValueError, TypeError):
            found.append(Build(**json.loads(line)))
    return found
