"""Batches of samples of one shape, and the threads that encode them and write their targets.

Few samples wait, so that memory does not grow with the number of items.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from types import TracebackType

from latentmake.caches.encoders import Loaded
from latentmake.caches.inputs import Sample

Release = Callable[[], object]
"""Called when a sample is encoded and no longer in memory."""

_SHAPES = 4  # full batches of other shapes that may wait
_STEP = 16  # tokens by which the lengths of batches differ, so that little padding is encoded


class Pipeline:
    """Encodes samples side by side; a context, at whose end all of them are done.

    An error of a worker is raised by the next call, or at the end; what waits is dropped then.

    Args:
        load: returns the encoder; called when the first sample comes.
        encode: encodes samples of one shape and writes their targets.
    """

    def __init__(
        self,
        load: Callable[[], Loaded],
        encode: Callable[[Loaded, list[Sample]], object],
    ) -> None:
        self._load, self._encode = load, encode
        self._loaded: Loaded | None = None
        self._pool: ThreadPoolExecutor | None = None
        self._waiting: dict[tuple[int, ...], tuple[list[Sample], list[Release]]] = {}
        self._running: set[Future[None]] = set()
        self._has_failed = False

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if error is None:
                self.flush()
                self._settle(0)
        finally:
            if self._pool is not None:
                self._pool.shutdown(cancel_futures=True)

    def _start(self) -> Loaded:
        """Load the encoder and start the workers, if need be."""
        if self._loaded is None:
            self._loaded = self._load()
            workers, threads = self._loaded.workers, self._loaded.threads
            self._pool = ThreadPoolExecutor(workers, "encoder", _use_threads, (threads,))
        return self._loaded

    def add(self, sample: Sample, release: Release = bool) -> None:
        """Add a sample, which is encoded when its batch is complete.

        Waits while as many batches wait as are encoded. Where many samples wait, the largest batch
        is encoded as it is. `release` is called when the sample is encoded, or dropped.
        """
        loaded = self._start()
        if loaded.lengths is not None and isinstance(sample.content, str):
            sample = sample._replace(tokens=_rounded(loaded.lengths(sample.content)))
        samples, releases = self._waiting.setdefault(sample.shape, ([], []))
        samples.append(sample)
        releases.append(release)
        if len(samples) >= loaded.limit(sample):
            self._submit(sample.shape)
        elif len(self._waiting) > _SHAPES:
            largest = max(self._waiting, key=lambda shape: len(self._waiting[shape][0]))
            waiting = sum(len(some) for some, _ in self._waiting.values())
            if waiting > _SHAPES * loaded.limit(self._waiting[largest][0][0]):
                self._submit(largest)

    def flush(self) -> None:
        """Hand over all that waits."""
        for shape in list(self._waiting):
            self._submit(shape)

    def _submit(self, shape: tuple[int, ...]) -> None:
        loaded = self._start()
        assert self._pool is not None
        self._settle(2 * loaded.workers - 1)
        self._running.add(self._pool.submit(self._run, loaded, *self._waiting.pop(shape)))

    def _settle(self, most: int) -> None:
        """Wait until at most so many batches are encoded, or wait for it."""
        while len(self._running) > most:
            done, self._running = wait(self._running, return_when=FIRST_COMPLETED)
            for future in done:
                future.result()

    def _run(self, loaded: Loaded, samples: list[Sample], releases: Sequence[Release]) -> None:
        try:
            if not self._has_failed:
                self._encode(loaded, samples)
        except BaseException:
            self._has_failed = True
            raise
        finally:
            samples.clear()
            for release in releases:
                release()


def _rounded(lengths: Sequence[int]) -> tuple[int, ...]:
    return tuple(-(-length // _STEP) * _STEP for length in lengths)


def _use_threads(number: int | None) -> None:
    """Let torch use so many threads of its own for what this thread computes."""
    if number is not None:
        import torch

        torch.set_num_threads(number)
