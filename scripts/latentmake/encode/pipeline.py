"""Batches of samples of one shape, and the threads that encode them and write their targets.

Only a few samples wait at any time, so memory does not grow with the number of items. If a single
sample does not fit into memory, either the item or the device is at fault. Another program may fill
a GPU for a while. Items that come then must not count as faulty: with `on_error: skip`, a run would
be trained without them.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from latentmake.base.errors import DeviceError, is_surely_memory
from latentmake.encode.job import Job
from latentmake.encode.reading import Encoder, Loaded, Sample
from latentmake.plan.manifest import read_lock
from latentmake.plan.orders import Order

Release = Callable[[], object]
"""Function that is called when a sample is encoded and no longer in memory."""
_Waiting = tuple[Sample, Job, Release]

_Again = Callable[[list[Sample]], tuple[object, str]]
"""Function that encodes samples a second time; its first result is None if they do not fit now."""

_SHAPES = 4  # full batches; if more samples wait than they hold, one batch is encoded incomplete
_STEP = 16  # token counts are rounded up to it: larger batches, little padding
_SHORTEST = 5.0  # seconds; in a shorter job the bottleneck would be chance
_BUSY = 0.85  # busy share of the time above which the device is the bottleneck
_CROWDED = 4  # a device is crowded if other programs hold at least 1/4 of its memory
_IN_A_ROW = 8  # after so many samples in a row that do not fit, no further sample is put off


class Pipeline(contextlib.AbstractContextManager["Pipeline"]):
    """Encodes the samples of all orders of a process in parallel; their jobs write the results.

    At the end of this context all samples are done. If a worker raises an error, the next call or
    the end of the context raises it, and waiting samples are dropped.

    Attributes:
        loaded: encoder, loaded when the first sample comes.

    Args:
        load: function that returns the encoder of an order.
        say: function that shows a line about a shortage of memory.
        settled: function that gets the number of samples that were just encoded or refused.
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
        self._seconds = {"encoding": 0.0, "writing": 0.0}  # sums over all workers
        self._began = self._ended = 0.0
        self._waiting: dict[tuple[int, ...], list[_Waiting]] = {}
        self._running: deque[Future[None]] = deque()
        self._has_failed = False
        self._lock = threading.Lock()  # guards the numbers that workers change
        # One worker at a time takes all turns: two that have some each would wait forever.
        self._alone = threading.Lock()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self.drain()
        finally:
            if self._pool is not None:
                self._pool.shutdown(cancel_futures=True)

    @property
    def bottleneck(self) -> str:
        """Busy share of the device, and the bottleneck; "" for a short job.

        A GPU serves one worker at a time; on a CPU each worker is a part of the device. Workers
        that neither encode nor write are waiting for the readers.
        """
        passed = self._ended - self._began
        if self.loaded is None or passed < _SHORTEST:
            return ""
        encoding, writing = self._seconds["encoding"], self._seconds["writing"]
        workers = self.loaded.workers
        busy = min(1.0, encoding / passed / (1 if self.loaded.queues else workers))
        reading = passed * workers - encoding - writing
        stage = "encoding" if busy > _BUSY else "reading" if reading > writing else "writing"
        return f"device busy {busy:.0%}, bottleneck: {stage}"

    def add(self, sample: Sample, job: Job, release: Release = bool) -> None:
        """Add a sample of a job. It is encoded when its batch is complete.

        Blocks while twice as many batches as workers are running or queued. If many samples wait,
        the largest batch is encoded incomplete. `release` is called when the sample is encoded or
        dropped.
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
            sample = sample._replace(
                tokens=tuple(-(-length // _STEP) * _STEP for length in lengths)
            )
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
        """Hand over all waiting batches, complete or not."""
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
        """Wait until at most `most` batches are running or queued."""
        while len(self._running) > most:
            self._running.popleft().result()

    # -- in threads -------------------------------------------------------------------------------

    def _run(self, loaded: Loaded, batch: list[_Waiting]) -> None:
        # Without the samples: their pixels must be gone before `release` lets others be read.
        releases = [(job, release) for _, job, release in batch]
        try:
            if not self._has_failed:
                self._encode(loaded, batch)
        except BaseException:
            self._has_failed = True
            raise
        finally:
            batch.clear()
            for job, release in releases:
                release()
                with self._lock:
                    job.waiting -= 1

    def _encode(self, loaded: Loaded, batch: list[_Waiting]) -> None:
        """Encode samples of one shape, as many at once as memory allows; raises DeviceError.

        On OOM, retry with half of the samples. If one sample does not fit, retry it while no other
        worker encodes, then with `frugal`. The bytes of a target never depend on free memory.
        """
        from latentmake.encode.encoders.device import attempt

        groups, shape, run = [batch], batch[0][0].shape, partial(self._results, loaded)
        while groups:
            group = groups.pop()
            size = self._shortages.most.get(shape, len(group))
            if len(group) > size:
                groups += [group[size:], group[:size]]
                continue
            samples = [sample for sample, _, _ in group]
            results, message = attempt(run, loaded.encode, samples)
            if results is None and len(group) > 1:
                self._shortages.halved(shape, len(group) // 2)
                self._say(f"out of memory with {len(group)} at once: trying half as many")
                groups.append(group)
                continue
            if results is None:  # `attempt` has freed memory, also for buffers of libraries
                results, message = attempt(run, loaded.encode, samples, alone=True)
            if results is None and loaded.frugal is not None:
                self._say(f"out of memory with one of {shape}: trying it in less memory")
                results, message = attempt(run, loaded.frugal, samples, alone=True)
            if results is None:
                again = partial(attempt, run, loaded.encode, alone=True)
                self._settled(self._shortages.judge(samples[0], message, again, group[0][1]))
                continue
            self._shortages.encoded(samples[0])
            with self._stage("writing"):
                for (sample, job, _), (tensors, metadata) in zip(group, results, strict=True):
                    job.store(sample.item, sample.key, sample.source, tensors, metadata)
            self._settled(len(group))

    @contextlib.contextmanager
    def _stage(self, stage: str) -> Iterator[None]:
        """Count the time of a worker as `encoding`, waits for results included, or as `writing`."""
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
        """Encode samples in parallel with other workers, or while none of them encodes (`alone`).

        If the encoder only queues work, one worker at a time calls it.
        """
        with self._stage("encoding"):
            with contextlib.ExitStack() as turns:
                if alone:
                    turns.enter_context(self._alone)
                for _ in range(loaded.workers if alone and not loaded.queues else 1):
                    turns.enter_context(self._turns)
                encoded = encode(samples)
            return list(encoded)


# -- shortages of memory --------------------------------------------------------------------------


def known_faults(job: Job) -> set[str]:
    """Return the stems of items that builds skipped with this recipe before, by the runs' locks."""
    common, dataset = job.common.items(), job.order.dataset
    locks = (read_lock(path.parent.name) for path in Path("runs").glob("*/dataset.lock"))
    faults = (fault for lock in locks for fault in lock.aside.get(dataset, ()))
    return {fault["stem"] for fault in faults if common <= fault.items()}


class _Shortages:
    """Decides whether the item or the device is at fault if a single sample does not fit.

    Methods may be called from several threads. The first row that applies decides:

    | encoded so far               | further condition                              | verdict |
    |------------------------------|------------------------------------------------|---------|
    | a sample at least as large   |                                                | device  |
    | anything or nothing          | first failure of one of several samples        | put off |
    | others, after it was put off |                                                | item    |
    | others, before that          | the device is idle, or the last one still fits | item    |
    | others, before that          |                                                | device  |
    | nothing                      | an earlier build skipped the item              | item    |
    | nothing                      | the device is idle, and no other was put off   | item    |
    | nothing                      |                                                | device  |

    A sample that is put off is tried again when the rest of the order is done. So a huge image
    stops no job, and a device that is full for a while costs no item. After `_IN_A_ROW` failures in
    a row, no sample is put off. The device is idle if memory was surely short and other programs
    hold little of it.
    """

    def __init__(self) -> None:
        self._encoded: set[tuple[int, ...]] = set()  # sizes of samples
        self._last: Sample | None = None
        self._batches = 0
        self._put_off: dict[str, int] = {}  # key -> number of batches encoded until then
        self._in_a_row = 0
        self.most: dict[tuple[int, ...], int] = {}  # shape -> number of samples that fit
        self._lock = threading.Lock()

    def halved(self, shape: tuple[int, ...], half: int) -> None:
        """Note that at most `half` samples of a shape fit."""
        with self._lock:
            self.most[shape] = min(half, self.most.get(shape, half))

    def encoded(self, sample: Sample) -> None:
        """Note that a sample was encoded."""
        with self._lock:
            self._encoded.add(sample.size)
            # Kept for another try. Not a clip: its pixels would fill the memory.
            if isinstance(sample.content, str) or len(sample.shape) == 3:
                self._last = sample
            self._batches += 1
            self._in_a_row = 0

    def judge(self, sample: Sample, message: str, again: _Again, job: Job) -> bool:
        """Refuse a sample that does not fit, or put it off; return whether it is refused.

        `message` is the library's. `again` encodes samples a second time.

        Raises:
            DeviceError: the device is at fault.
        """
        stop, model = self._stop(sample, message, again, job), job.order.model_settings
        if stop is None:
            return False
        what = "not enough memory to encode it, even by itself"
        hint = "end other programs and run the same command again"
        if not isinstance(sample.content, str):
            what += f" ({' x '.join(map(str, sample.shape[:-1]))} pixels)"
            key = "vae_cache_cpu" if model.spec.video else "vae_tiling"
            if job.order.makes_captions:
                hint += ", or set a smaller `image_size` of the captioner"
            else:
                hint += ", or lower the resolution"
                if not getattr(model, key):
                    hint += f"; `{key}: true` in the model encodes in tiles"
                    hint += " (and all its latents again)"
        if stop:
            raise DeviceError(f"{what}, {stop}: {message}", where=sample.item.name, hint=hint)
        job.refuse(sample.item, sample.key, "", f"{what}: {message}", hint)
        return True

    def _stop(self, sample: Sample, message: str, again: _Again, job: Job) -> str | None:
        """Return why the device is at fault, "" if the item is, or None if it is put off."""
        from latentmake.encode.encoders.device import held_by_others

        key, size = sample.key, sample.size
        with self._lock:
            if any(all(a >= b for a, b in zip(done, size, strict=True)) for done in self._encoded):
                return "though one as large was encoded before"
            is_first = key not in self._put_off
            before = self._put_off.setdefault(key, self._batches)
            self._in_a_row += is_first
            if is_first and len(job.order.paths) > 1 and self._in_a_row < _IN_A_ROW:
                return None
            if before < self._batches:
                return ""
            last, is_only = self._last, len(self._put_off) == 1
        others, total = held_by_others()
        is_crowded = others * _CROWDED >= total
        is_idle = is_surely_memory(message) and not is_crowded
        if self._encoded:
            if is_idle or (last is not None and again([last])[0] is not None):
                return ""
            return "and one that was encoded before does not fit any more"
        if (is_idle and is_only) or sample.item.stem in known_faults(job):
            return ""
        stop = "and no smaller one was encoded"
        if is_crowded:
            stop += f", while other programs hold {others / 1e9:.1f} of {total / 1e9:.1f} GB"
        return stop
