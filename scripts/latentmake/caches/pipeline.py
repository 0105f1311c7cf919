"""Batches of samples of one shape, and the threads that encode them and write their targets.

Few samples wait, so that memory does not grow with the number of items. Where memory is short for
a single sample, it is the item's fault or the device's. Another program may fill a GPU for a while:
items that come then must not count as faulty, or with `on_error: skip` a run would be trained
without them.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

from latentmake.caches.inputs import Encoder, Loaded, Sample
from latentmake.caches.job import Job
from latentmake.config.models import Model
from latentmake.errors import DeviceError, is_surely_memory
from latentmake.plan.orders import Order

Release = Callable[[], object]
"""Called when a sample is encoded and no longer in memory."""
_Waiting = tuple[Sample, Job, Release]

_Size = tuple[int, ...]
"""Frames and pixels of an image or clip; the numbers of tokens of a caption."""

_Again = Callable[[list[Sample]], object]
"""Encodes samples of before once more; None if they do not fit now."""

_SHAPES = 4  # full batches of other shapes that may wait
_STEP = 16  # tokens by which the lengths of batches differ, so that little padding is encoded
_SHORTEST = 5.0  # seconds below which chance decides on the bottleneck
_BUSY = 0.85  # share of time from which the device itself is the bottleneck
_CROWDED = 4  # other programs hold a device if they have one part in so many of its memory
_IN_A_ROW = 8  # samples that do not fit, none between them: then others are not tried


class Pipeline(contextlib.AbstractContextManager["Pipeline"]):
    """Encodes samples side by side, of all orders of a process, and has their jobs write them.

    A context, at whose end all samples are done. An error of a worker is raised by the next call,
    or at the end; what waits is dropped then.

    Attributes:
        loaded: the encoder, once there was a sample.

    Args:
        load: returns the encoder of an order; called when the first sample comes.
        say: told of shortages of memory.
        settled: told how many samples were encoded or refused.
    """

    def __init__(
        self,
        load: Callable[[Order], Loaded],
        say: Callable[[str], object] = bool,
        settled: Callable[[int], object] = bool,
    ) -> None:
        self._load, self._say, self._settled = load, say, settled
        self.loaded: Loaded | None = None
        self._pool: ThreadPoolExecutor | None = None
        self._shortages = _Shortages()
        self._seconds = {"encoding": 0.0, "writing": 0.0}  # of workers, from the first sample on
        self._began = self._ended = 0.0
        self._waiting: dict[tuple[int, ...], list[_Waiting]] = {}
        self._running: deque[Future[None]] = deque()
        self._has_failed = False
        self._lock = threading.Lock()  # of numbers that workers change
        self._alone = threading.Lock()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self.drain()
        finally:
            if self._pool is not None:
                self._pool.shutdown(cancel_futures=True)

    @property
    def words(self) -> str:
        """Share of the time that the device was busy, and the bottleneck; "" of a short job.

        A GPU works for one worker at a time; on a CPU each worker is a part of the device. Workers
        that neither encode nor write wait for something to be read.
        """
        passed = self._ended - self._began
        if self.loaded is None or passed < _SHORTEST:
            return ""
        encoding, writing = self._seconds["encoding"], self._seconds["writing"]
        workers = self.loaded.workers
        busy = min(1.0, encoding / passed / (1 if self.loaded.queues else workers))
        reading = passed * workers - encoding - writing
        bottleneck = "encoding" if busy > _BUSY else "reading" if reading > writing else "writing"
        return f"device busy {busy:.0%}, bottleneck: {bottleneck}"

    def add(self, sample: Sample, job: Job, release: Release = bool) -> None:
        """Add a sample of a job, which is encoded when its batch is complete.

        Waits while as many batches wait as are encoded. Where many samples wait, the largest batch
        is encoded as it is. `release` is called when the sample is encoded, or dropped.
        """
        loaded = self.loaded
        if loaded is None:
            job.take_gpu()
            loaded = self.loaded = self._load(job.order)
            self._turns = threading.Semaphore(1 if loaded.queues else loaded.workers)
            self._pool = ThreadPoolExecutor(loaded.workers, "encoder", loaded.begin)
        job.loaded = job.loaded or time.monotonic()
        if loaded.lengths is not None and isinstance(sample.content, str):
            lengths = loaded.lengths(sample.content)
            sample = sample._replace(tokens=tuple(-(-each // _STEP) * _STEP for each in lengths))
        with self._lock:
            job.waiting += 1
        batch = self._waiting.setdefault(sample.shape, [])
        batch.append((sample, job, release))
        if len(batch) >= loaded.limit(sample):
            self._submit(sample.shape)
        elif len(self._waiting) > _SHAPES:
            largest = max(self._waiting, key=lambda shape: len(self._waiting[shape]))
            limit = loaded.limit(self._waiting[largest][0][0])
            if sum(map(len, self._waiting.values())) > _SHAPES * limit:
                self._submit(largest)

    def flush(self) -> None:
        """Hand over all that waits."""
        for shape in list(self._waiting):
            self._submit(shape)

    def drain(self) -> None:
        """Wait until all samples are done."""
        self.flush()
        self._settle(0)

    def _submit(self, shape: tuple[int, ...]) -> None:
        assert self.loaded is not None and self._pool is not None
        self._settle(2 * self.loaded.workers - 1)
        batch = self._waiting.pop(shape)
        self._running.append(self._pool.submit(self._run, self.loaded, batch))

    def _settle(self, most: int) -> None:
        """Wait until at most so many batches are encoded, or wait for it."""
        while len(self._running) > most:
            self._running.popleft().result()

    # -- in threads -------------------------------------------------------------------------------

    def _run(self, loaded: Loaded, batch: list[_Waiting]) -> None:
        others = [(job, release) for _, job, release in batch]
        try:
            if not self._has_failed:
                self._encode(loaded, batch)
        except BaseException:
            self._has_failed = True
            raise
        finally:
            batch.clear()
            for job, release in others:
                release()
                with self._lock:
                    job.waiting -= 1

    def _encode(self, loaded: Loaded, batch: list[_Waiting]) -> None:
        """Encode samples of one shape, as many at once as memory suffices for; raises DeviceError.

        Out of memory: retry with half of them, with one while no other worker encodes, and with it
        in the frugal way: no target's bytes depend on how much memory was free.
        """
        from latentmake.caches.encoders.device import attempt, within_memory

        groups, shape, run = [batch], batch[0][0].shape, partial(self._results, loaded)
        while groups:
            group = groups.pop()
            size = self._shortages.most.get(shape, len(group))
            if len(group) > size:
                groups += [group[size:], group[:size]]
                continue
            samples = [sample for sample, _, _ in group]
            results, words = attempt(run, loaded.encode, samples)
            if results is None and len(group) > 1:
                self._shortages.halved(shape, len(group) // 2)
                self._say(f"out of memory with {len(group)} at once: trying half as many")
                groups.append(group)
                continue
            if results is None:  # what it held is free now, also for buffers of libraries
                results, words = attempt(run, loaded.encode, samples, alone=True)
            if results is None and loaded.frugal is not None:
                self._say(f"out of memory with one of {shape}: trying it in less memory")
                results, words = attempt(run, loaded.frugal, samples, alone=True)
            if results is None:
                again = partial(within_memory, run, loaded.encode, alone=True)
                self._settled(self._shortages.judge(samples[0], words, again, group[0][1]))
                continue
            self._shortages.encoded(samples[0])
            with self._stage("writing"):
                for (sample, job, _), (tensors, metadata) in zip(group, results, strict=True):
                    job.store(sample.item, sample.key, sample.source, tensors, metadata)
            self._settled(len(group))

    @contextlib.contextmanager
    def _stage(self, stage: str) -> Iterator[None]:
        """A worker's stay in `encoding` (or its wait for results), or in `writing`."""
        began = time.perf_counter()
        try:
            yield
        finally:
            with self._lock:
                self._began, self._ended = self._began or began, time.perf_counter()
                self._seconds[stage] += self._ended - began

    def _results(
        self, loaded: Loaded, encode: Encoder, samples: list[Sample], *, alone: bool = False
    ) -> list[tuple[dict[str, Any], dict[str, str]]]:
        """Encode beside the other workers, or `alone`; one at a time puts work into a queue."""
        with self._stage("encoding"):
            with contextlib.ExitStack() as turns:
                if alone:
                    turns.enter_context(self._alone)
                for _ in range(loaded.workers if alone and not loaded.queues else 1):
                    turns.enter_context(self._turns)
                encoded = encode(samples)
            return list(encoded)


# -- shortages of memory --------------------------------------------------------------------------


class _Shortages:
    """Judges samples that do not fit, by those that a process has encoded; for several threads.

    It is the device's fault if a sample as large was encoded before. A larger one is put off until
    the rest of the order is done: so one huge image stops no job, wherever in the order it comes,
    and a device that is full for a while costs no item. It is the item's fault if it does not fit
    then either, and another one was encoded in between, or no other program holds much of the
    memory, or one of before can be encoded once more. Where nothing fits at all, only a single item
    can be at fault, or one that an earlier build has named.
    """

    def __init__(self) -> None:
        self._encoded: set[_Size] = set()
        self._last: Sample | None = None
        self._batches = 0
        self._put_off: dict[str, int] = {}  # key -> batches that were encoded before
        self._in_a_row = 0
        self.most: dict[tuple[int, ...], int] = {}  # shape -> samples that memory suffices for
        self._lock = threading.Lock()

    def halved(self, shape: tuple[int, ...], half: int) -> None:
        """Learn that memory suffices for half of a batch at the most."""
        with self._lock:
            self.most[shape] = min(half, self.most.get(shape, half))

    def encoded(self, sample: Sample) -> None:
        """Learn that a sample was encoded."""
        with self._lock:
            self._encoded.add(sample.size)
            if isinstance(sample.content, str) or len(sample.shape) == 3:  # clips are too large
                self._last = sample
            self._batches += 1
            self._in_a_row = 0

    def judge(self, sample: Sample, words: str, again: _Again, job: Job) -> bool:
        """Refuse a sample of a job that does not fit, or put it off; return whether it is refused.

        One that is put off is tried again when the others of the order are done. `words` are the
        library's.

        Raises:
            DeviceError: the device is at fault.
        """
        known, order = sample.item.stem in job.known_faults, job.order
        stop = self._stop(sample, again, len(order.paths) < 2, is_surely_memory(words), known)
        if stop is None:
            return False
        what, hint = _too_large(sample, order.model_settings)
        if stop:
            raise DeviceError(f"{what}, {stop}: {words}", where=sample.item.name, hint=hint)
        job.refuse(sample.item, sample.key, "", f"{what}: {words}", hint)
        return True

    def _stop(
        self, sample: Sample, again: _Again, alone: bool, sure: bool, known: bool
    ) -> str | None:
        """Return why the device is at fault; "" if the item is, and None if it is put off."""
        from latentmake.caches.encoders.device import held_by_others

        key, size = sample.key, sample.size
        with self._lock:
            if any(all(a >= b for a, b in zip(each, size, strict=True)) for each in self._encoded):
                return "though one as large was encoded before"
            first = key not in self._put_off
            before = self._put_off.setdefault(key, self._batches)
            self._in_a_row += first
            if first and not alone and self._in_a_row < _IN_A_ROW:
                return None
            if before < self._batches:
                return ""
            last, is_only = self._last, len(self._put_off) == 1
        others, total = held_by_others()
        is_crowded = others * _CROWDED >= total
        is_idle = sure and not is_crowded
        if self._encoded:
            if is_idle or (last is not None and again([last]) is not None):
                return ""
            return "and one that was encoded before does not fit any more"
        if (is_idle and is_only) or known:
            return ""
        stop = "and no smaller one was encoded"
        if is_crowded:
            stop += f", while other programs hold {others / 1e9:.1f} of {total / 1e9:.1f} GB"
        return stop


def _too_large(sample: Sample, model: Model) -> tuple[str, str]:
    """Return what is wrong with a sample for which memory does not suffice, and a hint."""
    what = "not enough memory to encode it, even by itself"
    hint = "end other programs and run the same command again"
    if not isinstance(sample.content, str):
        what += f" ({' x '.join(map(str, sample.shape[:-1]))} pixels)"
        hint += ", or lower the resolution"
        if not getattr(model, key := "vae_cache_cpu" if model.spec.video else "vae_tiling"):
            hint += f"; `{key}: true` in the model encodes in tiles (and all its latents again)"
    return what, hint
