"""Adoption of other programs' cache files, the same for all of them.

That the model's encoders made a file from its item's present content is the user's word; what can
be checked is. Files are written atomically, so a killed adoption resumes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from latentmake.errors import CacheError, SourceError
from latentmake.exchange.record import Record
from latentmake.files import cachefile
from latentmake.plan.orders import FOLDER, WorkItem, WorkOrder
from latentmake.plan.receipts import Receipt
from latentmake.plan.spool import spooled
from latentmake.plan.store import put_away
from latentmake.progress import Progress

__all__ = [
    "ADOPTED",
    "FRESH",
    "OUTDATED",
    "STATES",
    "UNFIT",
    "WITHOUT",
    "Adoption",
    "Batch",
    "OutdatedError",
    "adopt_all",
    "header_of",
    "state_of",
]

STATES = ("adopted", "fresh already", "without a foreign file", "unfit", "out of date")
ADOPTED, FRESH, WITHOUT, UNFIT, OUTDATED = STATES
_LEAST_THREADS = 4  # they wait for the disk most of the time


class OutdatedError(CacheError):
    """A file is of other content than its item's present one."""


class Adoption(NamedTuple):
    """Stale targets to adopt for a run.

    Attributes:
        run: its name.
        orders: names of the work orders with its stale targets.
        fresh: targets up to date.
        passed: stale targets that no work order has.
        stale: targets of those work orders.
        planned: time in nanoseconds; names the receipts.
    """

    run: str
    orders: Sequence[str]
    fresh: int
    passed: int
    stale: int
    planned: int


class Batch(Protocol):
    """Adoption for one work order, in several threads.

    Attributes:
        sources: path -> stat and digest of what was read.
        targets: path -> stat and key of written targets.
        replaced: keys of replaced cache files.
    """

    sources: dict[str, list[Any]]
    targets: dict[str, list[Any]]
    replaced: list[str]

    def item(self, item: WorkItem) -> tuple[Counter[str], list[str]]:
        """Adopt an item's targets; return their number by state, and why files do not fit."""


def adopt_all(
    adoption: Adoption,
    batch_of: Callable[[WorkOrder, Record], Batch],
    *,
    say: Callable[[str], None],
    threads: int = 1,
) -> Counter[str]:
    """Adopt the stale targets of a run.

    Returns:
        Number of targets in each of `STATES`.

    Raises:
        StorageError: the disk is full or cannot be written.
    """
    total = Counter({FRESH: adoption.fresh, WITHOUT: adoption.passed})
    pool = ThreadPoolExecutor(max(threads, _LEAST_THREADS))
    with (
        ExitStack() as stack,
        Progress(total=adoption.stale, desc="adopting", unit="target") as progress,
    ):
        stack.callback(pool.shutdown, cancel_futures=True)
        records: dict[Path, Record] = {}
        for number, name in enumerate(adoption.orders):
            work = WorkOrder.read(FOLDER / f"{name}.json")
            path = Path(f"cache/{work.dataset}/{work.model}/adopted.tsv")
            if path not in records:
                records[path] = stack.enter_context(Record(path))
            batch = batch_of(work, records[path])
            counts: Counter[str] = Counter()
            for item, (states, lines) in zip(
                work.items, pool.map(batch.item, work.items), strict=True
            ):
                for line in lines:
                    say(line)
                counts += states
                progress.update(len(item.targets))
            total += counts
            receipt = FOLDER / f"adopted-{adoption.planned}-{number}.receipt.json"
            Receipt(batch.sources, batch.targets, [], dict(counts), 0.0).write(receipt)
            for key in batch.replaced:
                put_away(spooled(key), key)
    say(f"{adoption.run}: " + ", ".join(f"{total[state]} {state}" for state in STATES))
    return total


def state_of(error: CacheError | SourceError) -> str:
    """Return the state of a target whose file is refused."""
    return OUTDATED if isinstance(error, OutdatedError) else UNFIT


def header_of(path: Path) -> cachefile.Header | None:
    """Return the header of a file of ours; None for another file, or none."""
    try:
        return cachefile.read_header(path)
    except (CacheError, OSError):
        return None
