"""Adoption of other programs' cache files in place of encoding, and its record.

That the model's encoders made a file from its item's present content is the user's word; what can
be checked is. Files are written atomically, so a killed adoption resumes.

A cache file's header says so too, until an edit has it encoded again. This record remains: after a
further edit the other program's file, still of the first content, is not adopted for the new one.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from latentmake import digest
from latentmake.caches.inputs import Reading
from latentmake.caches.reading import identify
from latentmake.data.item import Item
from latentmake.errors import CacheError, SourceError, storage_error
from latentmake.files import atomic, cachefile
from latentmake.files.workspace import ADOPTED as RECORD
from latentmake.index.memo import target_stat
from latentmake.plan import store
from latentmake.plan.orders import FOLDER, Order, Work
from latentmake.plan.receipts import Receipt
from latentmake.plan.run_plan import RunPlan
from latentmake.plan.target import PROMPTS, Target
from latentmake.progress import Progress

_DIGITS = 20  # of each digest


class Record(AbstractContextManager["Record"]):
    """A text file of lines: name, digest of the file, digest of the source, with tabs between.

    A line is written before its cache file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._known: defaultdict[tuple[str, str], set[str]] = defaultdict(set)
        data = path.read_bytes() if path.is_file() else b""
        for line in data.decode("utf-8", "replace").splitlines():
            name, *digests = line.split("\t")
            if len(digests) == 2:
                self._known[name, digests[0]].add(digests[1])
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("ab", buffering=0)
            if data and not data.endswith(b"\n"):
                self._file.write(b"\n")  # a killed writer's last line
        except OSError as error:
            raise storage_error(error, path) or error from None

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def is_of_other(self, name: str, file: str, source: str) -> bool:
        """Whether a file of this digest was adopted for other content and never for this."""
        with self._lock:
            known = self._known.get((name, file[:_DIGITS]), set())
            return bool(known) and source[:_DIGITS] not in known

    def note(self, name: str, file: str, source: str) -> None:
        """Note that a file is adopted for some content.

        Raises:
            StorageError: the disk is full or cannot be written.
        """
        file, source = file[:_DIGITS], source[:_DIGITS]
        with self._lock:
            if source in self._known[name, file]:
                return
            try:
                self._file.write(f"{name}\t{file}\t{source}\n".encode())
            except OSError as error:
                raise storage_error(error, self._path) or error from None
            self._known[name, file].add(source)


STATES = ("adopted", "fresh already", "without a foreign file", "unfit", "out of date")
ADOPTED, FRESH, WITHOUT, UNFIT, OUTDATED = STATES
_LEAST_THREADS = 4  # they wait for the disk most of the time


class OutdatedError(CacheError):
    """A file is of other content than its item's present one."""


class OtherSizeError(CacheError):
    """A file is of another resolution of the run."""


class File(NamedTuple):
    """A file of another program, and the digest of its bytes."""

    path: Path
    data: bytes
    digest: str


class Format(Protocol):
    """Caches of another program."""

    @property
    def careful(self) -> bool:
        """Whether a file that may be older never replaces a cache file of other content."""

    def takes(self, work: Order) -> bool:
        """Whether targets of an order can be adopted."""

    def candidates(self, work: Order, item: Item, target: Target) -> Iterator[tuple[Path, ...]]:
        """Yield files that together may be a target."""

    def name(self, work: Order, path: Path) -> str:
        """Return the name of a file in the record of adopted files."""

    def check(
        self, files: Sequence[File], work: Order, source: Reading, target: Target, key: str
    ) -> bool:
        """Check files; return whether they tell what they were made of.

        Raises:
            CacheError: they do not fit.
        """

    def made(
        self, files: Sequence[File], work: Order, source: Reading, stamp: dict[str, str]
    ) -> bytes:
        """Return the cache file; a CacheError says why there is none."""


def adopt(
    plan: RunPlan, form: Format, *, say: Callable[[str], None], threads: int = 1
) -> Counter[str]:
    """Adopt the stale targets of a run; no build runs meanwhile.

    Args:
        plan: of the run.
        form: of the other program's files.
        say: receives why files are not adopted, and the sum.
        threads: that read and write files.

    Returns:
        Number of targets in each of `STATES`.

    Raises:
        StorageError: the disk is full or cannot be written.
    """
    works = [
        order
        for order in plan.orders
        if order.dataset != PROMPTS and not order.reuses and form.takes(order)
    ]
    states = [state for part, state in plan.parts.items() if part.dataset != PROMPTS]
    stale = sum(len(order.paths) for order in works)
    total = Counter({FRESH: sum(state.fresh for state in states)})
    total[WITHOUT] = sum(len(state.stale) for state in states) - stale
    store.keep(works)
    total += adopt_works(works, form, say=say, threads=threads)
    store.forget_made(works)
    say(f"{plan.name}: " + ", ".join(f"{total[state]} {state}" for state in STATES))
    return total


def adopt_works(
    works: Sequence[Order], form: Format, *, say: Callable[[str], None], threads: int = 1
) -> Counter[str]:
    """Adopt the targets of some orders; see `adopt`."""
    total: Counter[str] = Counter()
    planned, count = time.time_ns(), sum(len(work.paths) for work in works)
    pool = ThreadPoolExecutor(max(threads, _LEAST_THREADS))
    with (
        ExitStack() as stack,
        Progress(total=count, desc="adopting", unit="target") as progress,
    ):
        stack.callback(pool.shutdown, cancel_futures=True)
        records: dict[Path, Record] = {}
        for number, work in enumerate(works):
            path = Path(f"cache/{work.dataset}/{work.model}", RECORD)
            if path not in records:
                records[path] = stack.enter_context(Record(path))
            batch = _Batch(work, form, records[path])
            counts: Counter[str] = Counter()
            for item, (states, lines) in zip(
                work.items, pool.map(batch.item, work.items), strict=True
            ):
                for line in lines:
                    say(f"not adopted: {line}")
                counts += states
                progress.update(len(item.targets))
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

    def __init__(self, work: Order, form: Format, record: Record) -> None:
        self.sources: dict[str, list[Any]] = {}
        self.targets: dict[str, list[Any]] = {}
        self._work = work
        self._form = form
        self._record = record
        self._recipe = digest.of_value(work.recipe)
        self._made: dict[tuple[str, str], Path] = {}
        self._placing: dict[str, str] = {}
        self._lock = threading.Lock()

    def item(self, wanted: Work) -> tuple[Counter[str], list[str]]:
        """Adopt an item's targets; return their number by state, and why files do not fit."""
        item, number = wanted.item, len(wanted.targets)
        candidates = {
            target: [*self._form.candidates(self._work, item, target)] for target in wanted.targets
        }
        if not any(candidates.values()):
            return Counter({WITHOUT: number}), []
        reading = Reading(wanted)
        try:
            identify(self._work, self._recipe, reading)
            if wanted.content not in (None, reading.content):
                raise OutdatedError("was edited just now", where=item.name)
        except (CacheError, SourceError) as error:
            return Counter({_state_of(error): number}), [str(error)]
        except OSError as error:
            line = f"{error.filename or item.name}: cannot be read ({error.strerror})"
            return Counter({UNFIT: number}), [line]
        self.sources |= reading.sources
        self._placing |= reading.placing
        counts: Counter[str] = Counter()
        lines: dict[str, None] = {}
        for target, several in candidates.items():
            state, line = self._adopt(target, reading.keys[target], reading, several)
            counts[state] += 1
            if line:
                lines[line] = None
        return counts, [*lines]

    def _adopt(
        self, target: Target, key: str, source: Reading, candidates: list[tuple[Path, ...]]
    ) -> tuple[str, str]:
        """Adopt the first files that fit a target; return its state, and why none fits."""
        existing = header_of(Path(target.path))
        if existing is not None and existing.key == key:
            return FRESH, ""
        found: list[CacheError] = []
        for paths in candidates:
            try:
                self._take(paths, target, key, source, existing)
            except CacheError as error:
                found.append(error)
            except OSError as error:
                where = error.filename or paths[0]
                found.append(CacheError(f"cannot be read ({error.strerror})", where=where))
            else:
                return ADOPTED, ""
        if not found or isinstance(found[0], OtherSizeError):
            return WITHOUT, ""
        # Of several folders, those of other resolutions hold files of the same name.
        first = next((each for each in found if isinstance(each, OutdatedError)), found[0])
        return _state_of(first), str(first)

    def _take(
        self,
        paths: tuple[Path, ...],
        target: Target,
        key: str,
        source: Reading,
        existing: cachefile.Header | None,
    ) -> None:
        """Write one cache file from another program's.

        Raises:
            CacheError: they do not fit, or are of other content.
            OSError: one cannot be read.
            StorageError: the disk is full or cannot be written.
        """
        files = [
            File(path, data, digest.of_bytes(data))
            for path, data in ((path, path.read_bytes()) for path in paths)
        ]
        names = [self._form.name(self._work, path) for path in paths]
        sure = self._form.check(files, self._work, source, target, key)
        adopted = " ".join(file.digest for file in files)
        if not sure:
            edited = existing is not None and existing.source != source.content
            place = source.item.name
            if (edited and existing is not None and existing.adopted == adopted) or any(
                self._record.is_of_other(name, file.digest, source.content)
                for name, file in zip(names, files, strict=True)
            ):
                what = f"is of what {place} held before it was edited"
                raise OutdatedError(what, where=paths[0])
            if edited and self._form.careful:
                raise OutdatedError(
                    f"may be of what {place} held before it was edited, as {target.path} is",
                    where=paths[0],
                    hint="remove that file to adopt this one all the same",
                )
        with self._lock:
            made = self._made.get((key, adopted))
        if made is None or not store.link(made, Path(target.path), key):
            recipe, view = self._work.recipe, self._placing.get(key, "")
            stamp = cachefile.stamp(key=key, source=source.content, recipe=recipe, view=view)
            stamp[cachefile.ADOPTED] = adopted
            data = self._form.made(files, self._work, source, stamp)
            for name, file in zip(names, files, strict=True):
                self._record.note(name, file.digest, source.content)
            atomic.write(Path(target.path), data)
        with self._lock:
            self._made.setdefault((key, adopted), Path(target.path))
            self.targets[target.path] = [*target_stat(Path(target.path).stat()), key]


def _state_of(error: CacheError | SourceError) -> str:
    """Return the state of a target whose files are refused."""
    return OUTDATED if isinstance(error, OutdatedError) else UNFIT


def header_of(path: Path) -> cachefile.Header | None:
    """Return the header of a file of ours; None for another file, or none."""
    try:
        return cachefile.read_header(path)
    except (CacheError, OSError):
        return None
