"""Adoption of other programs' cache files in place of encoding, and its record.

That the model's encoders made a file from its item's present content is the user's word; what can
be checked is. Files are written atomically, so a killed adoption resumes.

The record says which content each file was adopted for. A cache file's header does so too, until an
edit has it encoded again. The record remains: after a further edit the other program's file, still
of the first content, is not adopted for the new one.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any, Protocol

from latentmake import digest
from latentmake.caches.inputs import Reading
from latentmake.caches.reading import identify
from latentmake.errors import CacheError, SourceError, storage_error
from latentmake.files import atomic, cachefile
from latentmake.files.workspace import ADOPTED as RECORD
from latentmake.index.memo import target_stat
from latentmake.plan.orders import FOLDER, Order, Work
from latentmake.plan.receipts import Receipt
from latentmake.plan.target import Target
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


class Format(Protocol):
    """Caches of another program."""

    @property
    def careful(self) -> bool:
        """Whether a file that may be older never replaces a cache file of other content."""

    def takes(self, order: Order) -> bool:
        """Whether targets of an order can be adopted."""

    def candidates(self, order: Order, work: Work, target: Target) -> Iterator[dict[str, Path]]:
        """Yield files that together may be a target, by their names in the record."""

    def check(
        self, files: Mapping[Path, bytes], order: Order, reading: Reading, target: Target, key: str
    ) -> bool:
        """Check files; return whether they tell what they were made of.

        Raises:
            CacheError: they do not fit.
            SourceError: the item's caption is faulty.
        """

    def made(
        self, files: Mapping[Path, bytes], order: Order, reading: Reading, stamp: dict[str, str]
    ) -> bytes:
        """Return the cache file; a CacheError says why there is none."""


def adopt(
    orders: Sequence[Order], form: Format, *, say: Callable[[str], None], threads: int = 1
) -> Counter[str]:
    """Adopt the targets of some orders; no build runs meanwhile.

    Args:
        orders: for the stale targets of a run.
        form: of the other program's files.
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
        records: dict[Path, Record] = {}
        for number, order in enumerate(orders):
            path = Path(f"cache/{order.dataset}/{order.model}", RECORD)
            if path not in records:
                records[path] = stack.enter_context(Record(path))
            batch = _Batch(order, form, records[path])
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

    def __init__(self, order: Order, form: Format, record: Record) -> None:
        self.sources: dict[str, list[Any]] = {}
        self.targets: dict[str, list[Any]] = {}
        self._order = order
        self._form = form
        self._record = record
        self._recipe = digest.of_value(order.recipe)
        self._made: dict[tuple[str, str], Path] = {}
        self._lock = threading.Lock()

    def adopt(self, work: Work) -> list[tuple[str, str]]:
        """Adopt an item's targets; return the state of each, and why no file fits."""
        candidates = {
            target: [*self._form.candidates(self._order, work, target)] for target in work.targets
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

    def _adopt(
        self, target: Target, reading: Reading, candidates: list[dict[str, Path]]
    ) -> tuple[str, str]:
        """Adopt the first files that fit a target; return its state, and why none fits."""
        existing = header_of(Path(target.path))
        if existing is not None and existing.key == reading.keys[target]:
            return FRESH, ""
        found: list[tuple[str, str]] = []
        for files in candidates:
            try:
                self._take(files, target, reading, existing)
            except OtherSizeError:
                found.append((WITHOUT, ""))
            except (CacheError, SourceError, OSError) as error:
                found.append(_refused(error, next(iter(files.values()))))
            else:
                return ADOPTED, ""
        # Of several folders, those of other resolutions hold files of the same name.
        outdated = (each for each in found if each[0] == OUTDATED)
        return next(outdated, found[0] if found else (WITHOUT, ""))

    def _take(
        self,
        paths: dict[str, Path],
        target: Target,
        reading: Reading,
        existing: cachefile.Header | None,
    ) -> None:
        """Write one cache file from another program's.

        Raises:
            CacheError: they do not fit, or are of other content.
            SourceError: the item's caption is faulty.
            OSError: one cannot be read.
            StorageError: the disk is full or cannot be written.
        """
        order, key = self._order, reading.keys[target]
        files = {path: path.read_bytes() for path in paths.values()}
        digests = {name: digest.of_bytes(files[path]) for name, path in paths.items()}
        adopted = " ".join(digests.values())
        if not self._form.check(files, order, reading, target, key):
            edited = existing is not None and existing.source != reading.content
            if (edited and existing is not None and existing.adopted == adopted) or any(
                self._record.is_of_other(name, file, reading.content)
                for name, file in digests.items()
            ):
                what = f"is of what {reading.item.name} held before it was edited"
                raise OutdatedError(what)
            if edited and self._form.careful:
                what = f"may be of what {reading.item.name} held before it was edited, as "
                hint = "remove that file to adopt this one all the same"
                raise OutdatedError(f"{what}{target.path} is", hint=hint)
        with self._lock:
            made = self._made.get((key, adopted))
        held = None if made is None else header_of(made)
        if made is not None and held is not None and held.key == key:  # no job replaced it
            atomic.link(made, Path(target.path))
        else:
            view = reading.placing.get(key, "")
            stamp = cachefile.stamp(key=key, source=reading.content, recipe=order.recipe, view=view)
            stamp[cachefile.ADOPTED] = adopted
            data = self._form.made(files, order, reading, stamp)
            for name, file in digests.items():
                self._record.note(name, file, reading.content)
            atomic.write(Path(target.path), data)
        with self._lock:
            self._made.setdefault((key, adopted), Path(target.path))
            self.targets[target.path] = [*target_stat(Path(target.path).stat()), key]


def _refused(error: CacheError | SourceError | OSError, where: str | Path) -> tuple[str, str]:
    """Return the state of a target whose files are refused, and why."""
    if isinstance(error, OSError):
        return UNFIT, f"{error.filename or where}: cannot be read ({error.strerror})"
    error.where = error.where or str(where)
    return OUTDATED if isinstance(error, OutdatedError) else UNFIT, str(error)


def header_of(path: Path) -> cachefile.Header | None:
    """Return the header of a file of ours; None for another file, or none."""
    try:
        return cachefile.read_header(path)
    except (CacheError, OSError):
        return None
