"""Adoption of other programs' cache files in place of encoding.

The user vouches that the model's encoders made a file from the item's present content. Adoption
checks the rest: names, shapes and other facts that a file tells. Files are written atomically, so a
killed adoption resumes.

If an item was edited after its cache file was written, the cache file is not replaced, because the
other program's file may be from before the edit, too. A file that tells its origin is adopted.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from latentmake.base import atomic, digest
from latentmake.base.digest import target_stat
from latentmake.base.errors import CacheError, OtherSizeError, OutdatedError, SourceError
from latentmake.base.progress import Progress
from latentmake.encode.reading import Reading, identify
from latentmake.formats import cachefile
from latentmake.formats.integrity import check as check_file
from latentmake.plan import store
from latentmake.plan.orders import FOLDER, PROMPTS, Order, Target, Work
from latentmake.plan.receipts import Receipt
from latentmake.plan.run_plan import RunPlan
from latentmake.trainers.exchange.trainer_caches import candidates, check, sizes_of, stamped

STATES = ("adopted", "fresh already", "without a foreign file", "unfit", "out of date")
ADOPTED, FRESH, WITHOUT, UNFIT, OUTDATED = STATES
_MOST_LINES = 100  # lines about files that are not adopted: a wrong setting may refuse them all


def adopt(
    plan: RunPlan, folders: Mapping[str, Sequence[str]], *, say: Callable[[str], None]
) -> Counter[str]:
    """Adopt the stale targets of a run. No build may run meanwhile.

    Args:
        plan: plan of the run.
        folders: dataset -> folders of the other program's files.
        say: function that shows a line: why files are not adopted, and the totals.

    Returns:
        Number of targets in each of `STATES`.

    Raises:
        StorageError: the disk is full or cannot be written.
    """
    orders = [order for order in plan.orders if folders.get(order.dataset) and not order.reuses]
    planned, count = time.time_ns(), sum(len(order.paths) for order in orders)
    total, unsaid = _others(plan, count), 0
    sizes = sizes_of(plan.parts)
    store.keep(orders)
    pool = ThreadPoolExecutor()  # more threads than cores: they mostly wait for the disk
    with ExitStack() as stack, Progress(total=count, desc="adopting", unit="target") as progress:
        stack.callback(pool.shutdown, cancel_futures=True)
        for number, order in enumerate(orders):
            batch = _Batch(order, folders[order.dataset], sizes)
            counts: Counter[str] = Counter()
            for work, results in zip(order.items, pool.map(batch.adopt, order.items), strict=True):
                for line in dict.fromkeys(line for _, line in results if line):
                    unsaid += 1
                    if unsaid <= _MOST_LINES:
                        say(f"not adopted: {line}")
                counts.update(state for state, _ in results)
                progress.update(len(work.targets))
            total += counts
            receipt = FOLDER / f"adopted-{planned}-{number}.receipt.json"
            Receipt(batch.sources, batch.targets, [], dict(counts), 0.0).write(receipt)
    store.forget_made(orders)
    if unsaid > _MOST_LINES:
        say(f"not adopted: {unsaid - _MOST_LINES} more; the next build encodes all of these")
    say(f"{plan.name}: " + ", ".join(f"{total[state]} {state}" for state in STATES))
    return total


def _others(plan: RunPlan, count: int) -> Counter[str]:
    """Count the targets of a plan by state, except `count` stale ones that may be adopted."""
    states = [state for part, state in plan.parts.items() if part.dataset != PROMPTS]
    stale = sum(len(state.to_make) for state in states)
    return Counter({FRESH: sum(state.fresh for state in states), WITHOUT: stale - count})


class _Batch:
    """Adoption for one order, called by several threads.

    Attributes:
        sources: path -> stat and digest of a source that was read.
        targets: path -> stat and key of a target that was written.
    """

    def __init__(
        self, order: Order, folders: Sequence[str], sizes: Collection[tuple[int, int]]
    ) -> None:
        self.sources: dict[str, list[Any]] = {}
        self.targets: dict[str, list[Any]] = {}
        self._order = order
        self._folders, self._sizes = folders, sizes
        self._recipe = digest.of_value(order.recipe)
        self._made: dict[tuple[str, str], Path] = {}
        self._lock = threading.Lock()

    def adopt(self, work: Work) -> list[tuple[str, str]]:
        """Adopt an item's targets; return for each its state and why no file fits, or ""."""
        paths = {
            target: candidates(self._folders, self._order, work.item.stem, target)
            for target in work.targets
        }
        if not any(paths.values()):
            return [(WITHOUT, "")] * len(paths)
        reading = Reading(work)
        try:
            identify(self._order, self._recipe, reading)
            if work.content not in (None, reading.content):
                raise OutdatedError("was edited just now", where=work.item.name)
        except (CacheError, SourceError, OSError) as error:
            return [_refused(error, work.item.name)] * len(paths)
        self.sources |= reading.sources
        return [self._adopt(target, reading, files) for target, files in paths.items()]

    def _adopt(self, target: Target, reading: Reading, paths: list[Path]) -> tuple[str, str]:
        """Adopt the first file that fits a target; return its state and why none fits, or ""."""
        existing = cachefile.header_of(Path(target.path))
        if existing is not None and existing.key == reading.keys[target]:
            return FRESH, ""
        refused: list[tuple[str, str]] = []
        for path in paths:
            try:
                self._take(path, target, reading, existing)
            except OtherSizeError:
                continue  # the file belongs to the target of another resolution
            except (CacheError, SourceError, OSError) as error:
                refused.append(_refused(error, path))
            else:
                return ADOPTED, ""
        # Folders of other resolutions have files of the same name, which do not fit anyway. So an
        # outdated file is the better reason.
        outdated = (reason for reason in refused if reason[0] == OUTDATED)
        return next(outdated, refused[0] if refused else (WITHOUT, ""))

    def _take(
        self, path: Path, target: Target, reading: Reading, existing: cachefile.Header | None
    ) -> None:
        """Write a cache file from another program's file; raises UserError and OSError."""
        order, key, place = self._order, reading.keys[target], Path(target.path)
        data = path.read_bytes()
        adopted = digest.of_bytes(data)
        tells_origin = check(data, order, reading, target, self._sizes)
        if not tells_origin and existing is not None and existing.source != reading.content:
            name = reading.work.item.name
            what = f"may be of what {name} held before it was edited, as {target.path} is"
            hint = "remove that file to adopt this one all the same"
            raise OutdatedError(what, hint=hint)
        with self._lock:  # several threads share `_made` and `targets`
            made = self._made.get((key, adopted))
        if made is not None:
            atomic.link(made, place)
        else:
            view, recipe = reading.placing.get(key, ""), order.recipe
            stamp = cachefile.stamp(key=key, source=reading.content, recipe=recipe, view=view)
            file = stamped(data, order, reading, {**stamp, cachefile.ADOPTED: adopted})
            if damage := check_file(file).damage:  # NaN, or nothing but zeros
                raise CacheError(damage)
            atomic.write(place, file)
        with self._lock:
            self._made.setdefault((key, adopted), place)
            self.targets[target.path] = [*target_stat(place.stat()), key]


def _refused(error: CacheError | SourceError | OSError, where: str | Path) -> tuple[str, str]:
    if isinstance(error, OSError):
        return UNFIT, f"{error.filename or where}: cannot be read ({error.strerror})"
    error.where = error.where or str(where)
    return OUTDATED if isinstance(error, OutdatedError) else UNFIT, str(error)
