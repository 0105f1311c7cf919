"""Adoption of other programs' cache files in place of encoding.

That the model's encoders made a file from its item's present content is the user's word; what can
be checked is. Files are written atomically, so a killed adoption resumes. A cache file of other
content, whose item was edited since, is not replaced: the other program's file may be as old.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from latentmake import digest
from latentmake.caches.inputs import Reading, identify
from latentmake.digest import target_stat
from latentmake.errors import CacheError, SourceError
from latentmake.exchange.trainer_caches import OutdatedError, TrainerCaches
from latentmake.files import atomic, cachefile
from latentmake.plan.orders import FOLDER, Order, Target, Work
from latentmake.plan.receipts import Receipt
from latentmake.progress import Progress

STATES = ("adopted", "fresh already", "without a foreign file", "unfit", "out of date")
ADOPTED, FRESH, WITHOUT, UNFIT, OUTDATED = STATES
_LEAST_THREADS = 4  # they wait for the disk most of the time


def adopt(
    orders: Sequence[Order], caches: TrainerCaches, *, say: Callable[[str], None], threads: int = 1
) -> Counter[str]:
    """Adopt the targets of some orders; no build runs meanwhile.

    Args:
        orders: for the stale targets of a run.
        caches: of the other program.
        say: receives why files are not adopted.
        threads: that read and write files.

    Returns:
        Number of targets in each of `STATES`.

    Raises:
        StorageError: the disk is full or cannot be written.
    """
    total: Counter[str] = Counter()
    planned, count = time.time_ns(), sum(len(order.paths) for order in orders)
    pool = ThreadPoolExecutor(max(threads, _LEAST_THREADS))
    with (
        ExitStack() as stack,
        Progress(total=count, desc="adopting", unit="target") as progress,
    ):
        stack.callback(pool.shutdown, cancel_futures=True)
        for number, order in enumerate(orders):
            batch = _Batch(order, caches)
            counts: Counter[str] = Counter()
            for work, states in zip(order.items, pool.map(batch.adopt, order.items), strict=True):
                for line in dict.fromkeys(line for _, line in states if line):
                    say(f"not adopted: {line}")
                counts.update(state for state, _ in states)
                progress.update(len(work.targets))
            total += counts
            receipt = FOLDER / f"adopted-{planned}-{number}.receipt.json"
            Receipt(batch.sources, batch.targets, [], dict(counts), 0.0).write(receipt)
    return total


class _Batch:
    """Adoption for one order, in several threads.

    Attributes:
        sources: path -> stat and digest of what was read.
        targets: path -> stat and key of written targets.
    """

    def __init__(self, order: Order, caches: TrainerCaches) -> None:
        self.sources: dict[str, list[Any]] = {}
        self.targets: dict[str, list[Any]] = {}
        self._order = order
        self._caches = caches
        self._recipe = digest.of_value(order.recipe)
        self._made: dict[tuple[str, str], Path] = {}
        self._lock = threading.Lock()

    def adopt(self, work: Work) -> list[tuple[str, str]]:
        """Adopt an item's targets; return the state of each, and why no file fits."""
        candidates = {
            target: [*self._caches.candidates(self._order, work, target)] for target in work.targets
        }
        if not any(candidates.values()):
            return [(WITHOUT, "")] * len(candidates)
        reading = Reading(work)
        try:
            identify(self._order, self._recipe, reading)
            if work.content not in (None, reading.content):
                raise OutdatedError("was edited just now", where=work.item.name)
        except (CacheError, SourceError, OSError) as error:
            return [_refused(error, work.item.name)] * len(candidates)
        self.sources |= reading.sources
        return [self._adopt(target, reading, several) for target, several in candidates.items()]

    def _adopt(self, target: Target, reading: Reading, candidates: list[Path]) -> tuple[str, str]:
        """Adopt the first file that fits a target; return its state, and why none fits."""
        existing = cachefile.header_of(Path(target.path))
        if existing is not None and existing.key == reading.keys[target]:
            return FRESH, ""
        found: list[tuple[str, str]] = []
        for path in candidates:
            try:
                self._take(path, target, reading, existing)
            except (CacheError, SourceError, OSError) as error:
                found.append(_refused(error, path))
            else:
                return ADOPTED, ""
        # Of several folders, those of other resolutions hold files of the same name.
        outdated = (each for each in found if each[0] == OUTDATED)
        return next(outdated, found[0] if found else (WITHOUT, ""))

    def _take(
        self,
        path: Path,
        target: Target,
        reading: Reading,
        existing: cachefile.Header | None,
    ) -> None:
        """Write a cache file from another program's.

        Raises:
            CacheError: it does not fit, or is of other content.
            SourceError: the item's caption is faulty.
            OSError: it cannot be read.
            StorageError: the disk is full or cannot be written.
        """
        order, key = self._order, reading.keys[target]
        data = path.read_bytes()
        adopted = digest.of_bytes(data)
        knows = self._caches.check(data, order, reading, target)
        if not knows and existing is not None and existing.source != reading.content:
            name = reading.work.item.name
            what = f"may be of what {name} held before it was edited, as {target.path} is"
            hint = "remove that file to adopt this one all the same"
            raise OutdatedError(what, hint=hint)
        with self._lock:
            made = self._made.get((key, adopted))
        if made is not None:
            atomic.link(made, Path(target.path))
        else:
            view = reading.placing.get(key, "")
            stamp = cachefile.stamp(key=key, source=reading.content, recipe=order.recipe, view=view)
            stamp[cachefile.ADOPTED] = adopted
            atomic.write(Path(target.path), self._caches.made(data, order, stamp))
        with self._lock:
            self._made.setdefault((key, adopted), Path(target.path))
            self.targets[target.path] = [*target_stat(Path(target.path).stat()), key]


def _refused(error: CacheError | SourceError | OSError, where: str | Path) -> tuple[str, str]:
    """Return the state of a target whose files are refused, and why."""
    if isinstance(error, OSError):
        return UNFIT, f"{error.filename or where}: cannot be read ({error.strerror})"
    error.where = error.where or str(where)
    return OUTDATED if isinstance(error, OutdatedError) else UNFIT, str(error)
