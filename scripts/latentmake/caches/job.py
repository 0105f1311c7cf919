"""State of a job: sources are read once, encoded targets get their names at once.

A batch job declares no target to Snakemake, which deletes the outputs of a failed job: the next
plan finds what this one finished. One bad source stops no other.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from latentmake import digest
from latentmake.caches.encoders import Encoder, Loaded
from latentmake.caches.inputs import Reading, Sample
from latentmake.caches.pipeline import Pipeline
from latentmake.caches.reading import identify, read_ahead, samples_of, unreadable
from latentmake.caches.refusals import fault_of, skipped_before, too_large, wrong_values
from latentmake.caches.shortages import Again, Shortages, encode_in_parts
from latentmake.caches.stages import Stages
from latentmake.data import remote
from latentmake.data.item import Item
from latentmake.errors import DeviceError, SourceError, is_surely_memory
from latentmake.files import atomic, cachefile
from latentmake.files.paths import is_remote
from latentmake.files.readers import Readers
from latentmake.index.memo import target_stat
from latentmake.plan import store
from latentmake.plan.orders import Order, Work
from latentmake.plan.target import Target
from latentmake.progress import Progress

Say = Callable[[str], None]
ExternalEncoder = Callable[["Job", Sequence[Work], int, Progress], None]
"""Makes the missing targets of some items, by another program and n threads."""


@dataclass
class Job:
    """State of an order being carried out.

    Attributes:
        order: of the job.
        recipe: of its targets.
        say: told of faults, a line each.
        fresh: path -> stat (size, mtime_ns, inode) and key of every finished target.
        places: key -> a file that holds it.
        paths: key -> path of the target that its content is encoded for.
        wanted: path -> item and key of the targets to link.
        sources: path -> stat and digest of each source, for the receipt.
        faults: faulty items, for the receipt.
        failed: stem -> fault in a line.
        refused: key -> source, fault and hint of content that cannot be encoded; the source's
            digest is "" if the next build shall retry.
        counts: of targets, for the receipt.
        loaded: moment (time.monotonic) when another program came to the first item.
        stages: account of its time.
        before: key -> file of what this process has made for other orders.
        shortages: of memory in this process.
        take_gpu: waits for a GPU for another program; called when sources are read.
    """

    order: Order
    recipe: dict[str, object]
    say: Say
    fresh: dict[str, list[Any]] = field(default_factory=dict)
    places: dict[str, Path] = field(default_factory=dict)
    paths: dict[str, str] = field(default_factory=dict)
    wanted: dict[str, tuple[Work, str]] = field(default_factory=dict)
    sources: dict[str, list[Any]] = field(default_factory=dict)
    placing: dict[str, str] = field(default_factory=dict)
    faults: list[dict[str, str]] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    refused: dict[str, tuple[str, str, str]] = field(default_factory=dict)
    counts: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(("encoded", "spooled", "linked", "kept"), 0)
    )
    loaded: float | None = None
    stages: Stages = field(default_factory=Stages)
    before: Mapping[str, str] = field(default_factory=dict)
    shortages: Shortages = field(default_factory=Shortages)
    take_gpu: Callable[[], object] = bool

    def __post_init__(self) -> None:
        self._recipe_text = digest.canonical(self.recipe)
        self.recipe_digest = digest.of_bytes(self._recipe_text.encode())
        # Asked for each target, unless the folder is empty, as it is most often.
        self._has_store = bool(store.keys())
        self._lock = threading.RLock()  # of all that workers change
        self._turns: threading.Semaphore | None = None
        self._alone = threading.Lock()

    # -- reading ------------------------------------------------------------------------------

    @property
    def cuts_clips(self) -> bool:
        """Whether its targets are clips of videos."""
        return self.order.kind == "latents" and self.order.dataset_settings.video

    def readings(
        self, items: Sequence[Work], threads: int, progress: Progress
    ) -> Iterator[Reading]:
        """Read items, a few of them ahead, and count their targets that need no encoding.

        Content that several targets share is missing for the first of them only. Videos are opened,
        and make no samples.
        """
        making: set[str] = set()
        for reading in self._read_ahead(items, threads):
            new = {key: target for target, key in reading.missing.items() if key not in making}
            samples = {each.key: each for each in reading.samples if each.key in new}
            reading.missing = {target: key for key, target in new.items()}
            reading.samples = list(samples.values())
            self._count(reading, making, progress)
            yield reading

    def _count(self, reading: Reading, making: set[str], progress: Progress) -> None:
        """Note the result of a reading and its targets that need no encoding.

        `making` are the keys of all targets that this job has met, to which these are added.
        """
        progress.update(len(reading.work.targets) - len(reading.missing))
        making |= set(reading.missing.values())
        self.paths |= {key: target.path for target, key in reading.missing.items()}
        with self._lock:
            self._take_in(reading, making)
        making |= set(reading.keys.values())

    def _read_ahead(self, items: Sequence[Work], threads: int) -> Iterator[Reading]:
        if any(is_remote(each.item.source or "") for each in items):
            threads = max(threads, remote.SIDE_BY_SIDE // 2)  # they mostly wait
        elif self.order.kind == "text" and not any(each.item.controls for each in items):
            # One takes less time than a thread to wake up, on a disk of this machine.
            yield from read_ahead(items, self.read, threads, at_once=16)
            return
        with Readers() as readers:
            yield from read_ahead(items, lambda work: self._checked(work, readers), threads)

    def _checked(self, work: Work, readers: Readers) -> Reading:
        """Read an item; open its video, if it has one."""
        reading = self.read(work)
        if self.cuts_clips and reading.missing:
            try:
                from latentmake.caches.clips import check_clips  # which few jobs need

                check_clips(self.order, reading, readers)
            except SourceError as error:
                reading.fail(str(error))
        return reading

    def _take_in(self, reading: Reading, making: set[str]) -> None:
        """Note the result of a reading; `making` holds the keys of its missing targets, too."""
        item, uncounted = reading.item, set(reading.missing.values())
        self.sources |= reading.sources
        self.placing |= reading.placing
        if reading.work.content is not None and reading.content not in ("", reading.work.content):
            self.say(
                f"{item.source}: was edited after this build was planned; its caches are made of "
                "what it holds now"
            )
        if reading.fault is not None:
            self.fail(item, reading.content, reading.fault)
        self.counts["kept"] += reading.kept
        for target, key in reading.keys.items():
            self.wanted[target.path] = (reading.work, key)
            if key in uncounted:
                uncounted.remove(key)  # counted when it is encoded
                continue
            is_stored = self.places.get(key) == store.stored(key) and key not in making
            self.counts["spooled" if is_stored else "linked"] += 1

    def read(self, work: Work, known: dict[str, list[Any]] | None = None) -> Reading:
        """Read an item's source, and decode an image or a caption unless all its targets exist.

        `known` are the stat and digest of files read just now.
        """
        reading = Reading(work, sources=dict(known or {}))
        try:
            self._read(reading)
        except SourceError as error:
            reading.fail(str(error))
        except OSError as error:
            reading.fail(str(unreadable(error, work.item.name)))
        return reading

    def _read(self, reading: Reading) -> None:
        identify(self.order, self.recipe_digest, reading)
        found, reading.keys = reading.keys, {}
        for target, key in found.items():
            # Found while planning, or written since: by a job that was killed and is tried again.
            if store.holds(Path(target.path), key):
                reading.kept += 1
                self._finish(target.path, key, Path(target.path).stat())
                continue
            reading.keys[target] = key
            if place := next((x for x in self._places(target, key) if store.holds(x, key)), None):
                self.places[key] = place
            else:
                reading.missing[target] = key
        if reading.missing and not self.cuts_clips:
            reading.samples = samples_of(self.order, reading)
        reading.data, reading.others = b"", {}

    def _places(self, target: Target, key: str) -> Iterator[Path]:
        """Yield the files besides its own that may hold a target; most often there are none."""
        if self._has_store:
            yield store.stored(key)
        if key in self.before:
            yield Path(self.before[key])
        yield from map(Path, target.at_hand)

    # -- encoding -----------------------------------------------------------------------------

    def make(
        self,
        items: Sequence[Work],
        load: Callable[[], Loaded],
        threads: int,
        progress: Progress,
    ) -> None:
        """Make the missing targets of some items; `load` is called when needed."""

        def encode(loaded: Loaded, samples: list[Sample]) -> None:
            progress.update(self.encode(loaded, samples))

        with Pipeline(load, encode) as pipeline:
            if self.cuts_clips:
                self._make_clips(items, pipeline, threads, progress)
            else:
                for reading in self.readings(items, threads, progress):
                    for sample in reading.samples:
                        pipeline.add(sample)
        self.refuse_equal()

    def _make_clips(
        self, items: Sequence[Work], pipeline: Pipeline, threads: int, progress: Progress
    ) -> None:
        from latentmake.caches.clips import make_clips  # which few jobs need

        making: set[str] = set()

        def fail(reading: Reading, left: int, fault: str) -> None:
            progress.update(left)
            self.fail(reading.item, reading.content, fault)

        make_clips(
            self.order,
            items,
            pipeline,
            threads,
            read_item=self.read,
            count=lambda reading: self._count(reading, making, progress),
            fail=fail,
        )

    def encode(self, loaded: Loaded, samples: list[Sample]) -> int:
        """Encode samples of one shape, and write their targets; return how many are settled.

        Raises:
            DeviceError: the device is at fault, not an item; see `Shortages`.
        """
        from latentmake.caches.encoders.device import within_memory

        settled, run = 0, partial(self._results, loaded)
        again = partial(within_memory, run, loaded.encode, alone=True)
        for group, results, words in encode_in_parts(
            loaded, samples, run, self.shortages, self.say
        ):
            if results is None:
                settled += self._does_not_fit(group[0], words, again)
                continue
            settled += len(group)
            with self.stages.of("writing"):
                for sample, (tensors, metadata) in zip(group, results, strict=True):
                    self.store(sample.item, sample.key, sample.source, tensors, metadata)
        return settled

    def _does_not_fit(self, sample: Sample, words: str, again: Again) -> bool:
        """Refuse a sample, put it off (`deliver` returns its item), or stop the job."""
        alone, sure = len(self.order.paths) < 2, is_surely_memory(words)
        known = sample.item.stem in self.known_faults
        verdict = self.shortages.judge(sample, again, alone=alone, sure=sure, known=known)
        what, hint = too_large(sample, self.order.model_settings)
        if verdict.stop:
            what = f"{what}, {verdict.stop}: {words}"
            raise DeviceError(what, where=sample.item.name, hint=hint)
        if verdict.refuse:
            self.refuse(sample.item, sample.key, "", f"{what}: {words}", hint)
        return verdict.refuse

    def _results(
        self, loaded: Loaded, encode: Encoder, samples: list[Sample], *, alone: bool = False
    ) -> list[tuple[dict[str, Any], dict[str, str]]]:
        with self.stages.of("encoding"):
            with self._turn(loaded, alone=alone):
                encoded = encode(samples)
            return list(encoded)

    @contextlib.contextmanager
    def _turn(self, loaded: Loaded, *, alone: bool) -> Iterator[None]:
        """Wait until this worker may encode: beside the others, or alone.

        One at a time puts work into a device's queue.
        """
        count = 1 if loaded.queues else loaded.workers
        with self._lock:
            turns = self._turns = self._turns or threading.Semaphore(count)
        if not alone:
            with turns:
                yield
            return
        with self._alone, contextlib.ExitStack() as all_turns:
            for _ in range(count):
                all_turns.enter_context(turns)
            yield

    def store(
        self,
        item: Item,
        key: str,
        source: str,
        tensors: dict[str, Any],
        metadata: dict[str, str],
        nonzero: Collection[str] | None = None,
    ) -> None:
        """Write a finished target under its name, or refuse it for NaN, infinity or all zeros.

        `source` is the digest of what it was made from; `metadata` goes into its header; for
        `nonzero` see `fault_of`.

        Raises:
            StorageError: the disk is full or cannot be written.
        """
        if fault := fault_of(tensors, nonzero):
            self.refuse(item, key, source, *wrong_values(fault, self.order.model_settings))
            return
        path = self.paths[key]
        stamp = cachefile.stamp(
            key=key, source=source, recipe=self._recipe_text, view=self.placing.get(key, "")
        )
        if self.order.layout.npz:
            from latentmake.caches.encoders.sdscripts import file_bytes

            data = file_bytes(self.order.kind, self.order.model_settings, tensors, stamp)
            stat = atomic.write(path, data)
        else:
            stat = atomic.write(path, *cachefile.pieces(tensors, metadata | stamp))
        with self._lock:
            self.places[key] = Path(path)
            self.wanted.pop(path, None)
            self._finish(path, key, stat)
            self.counts["encoded"] += 1

    def _finish(self, path: str, key: str, stat: os.stat_result) -> None:
        self.fresh[path] = [*target_stat(stat), key]

    # -- faults -------------------------------------------------------------------------------

    @cached_property
    def known_faults(self) -> set[str]:
        """Stems of the items that earlier builds skipped."""
        return skipped_before(self.order, self.recipe_digest)

    def fail(self, item: Item, content: str, line: str) -> None:
        """Note a faulty item; the job goes on with the others."""
        order, beside = self.order, {"controls": item.controls, "layers": item.layers}
        fault = {"dataset": order.dataset, "model": order.model, "kind": order.kind}
        fault |= {"recipe": self.recipe_digest, "stem": item.stem, "path": item.source or ""}
        fault |= {name: "\n".join(paths) for name, paths in beside.items() if paths}
        with self._lock:
            self.say(f"faulty: {line}")
            self.failed[item.stem] = line
            self.faults.append({**fault, "digest": content, "line": line})

    def refuse(self, item: Item, key: str, source: str, what: str, hint: str) -> None:
        """Refuse the content of an item's target, named by its key; see `refused`."""
        self.refused[key] = (source, what, hint)
        self.fail(item, source, str(SourceError(what, where=item.name, hint=hint)))

    def refuse_equal(self) -> None:
        """Refuse the items whose content equals that of a refused one."""
        for work, key in self.wanted.values():
            if key in self.refused and work.item.stem not in self.failed:
                self.refuse(work.item, key, *self.refused[key])

    # -- linking ------------------------------------------------------------------------------

    def deliver(self) -> list[Work]:
        """Link what was found elsewhere or made for other targets to the names of its targets.

        Returns:
            Items whose files another build has just deleted, or that memory did not suffice for:
            they must be made again.
        """
        linked: dict[str, Path] = {}
        lost: dict[tuple[str, str | None], Work] = {}
        for path, (work, key) in list(self.wanted.items()):
            if work.item.stem in self.failed:
                continue
            for place in (self.places.get(key), linked.get(key)):
                if place is not None and store.link(place, Path(path), key):
                    linked[key] = Path(path)
                    self._finish(path, key, Path(path).stat())
                    del self.wanted[path]
                    break
            else:
                self.places.pop(key, None)
                lost[work.item.stem, work.item.text] = work
        return [each._replace(targets=self._unmade(each)) for each in lost.values()]

    def _unmade(self, work: Work) -> tuple[Target, ...]:
        return tuple(each for each in work.targets if each.path in self.wanted)
