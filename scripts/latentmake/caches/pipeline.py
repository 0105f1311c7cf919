"""Worker threads of a job: each encodes a batch of samples, and checks and writes its targets.

Few batches wait for them, so that memory does not grow with the number of items.
"""

from __future__ import annotations

import math
import queue
import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import NamedTuple

from latentmake.caches.encoders import Loaded
from latentmake.caches.inputs import Sample

Release = Callable[[], object]
"""Called when a sample is encoded and no longer in memory."""


_SMALL, _AT_ONCE = 1 << 18, 8  # numbers in all samples handed over at once, and samples


class _Batch(NamedTuple):
    samples: list[Sample]
    releases: Sequence[Release]


class Pipeline:
    """Encodes samples side by side; a context, at whose end all of them are done.

    An error of a worker is raised by the next call, or at the end; the batches that wait are
    dropped.

    Args:
        load: returns the encoder; called when the first batch comes.
        encode: encodes samples of one shape, and writes their targets.
    """

    def __init__(
        self,
        load: Callable[[], Loaded],
        encode: Callable[[Loaded, list[Sample]], object],
    ) -> None:
        self._load = load
        self._encode = encode
        self._loaded: Loaded | None = None
        self._workers: list[threading.Thread] = []
        self._waiting: queue.Queue[_Batch | None] = queue.Queue()
        self._error: BaseException | None = None

    def size(self, shape: tuple[int, ...]) -> int:
        """Return the number of samples of a shape to hand over at once.

        Several batches if they are small: handing over takes as long as encoding a tiny one.
        """
        size = self.loaded().size_of(shape)
        return size * max(1, min(_AT_ONCE, _SMALL // math.prod(shape)) // size)

    def submit(self, samples: list[Sample], releases: Sequence[Release]) -> None:
        """Hand over samples of one shape; waits while as many batches wait as are encoded."""
        self.loaded()
        self._raise()
        self._waiting.put(_Batch(samples, releases))
        self._raise()

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None:
            self._error = self._error or error  # what waits is dropped
        for _ in self._workers:
            self._waiting.put(None)
        for worker in self._workers:
            worker.join()
        if error is None:
            self._raise()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def loaded(self) -> Loaded:
        """Return the encoder; load it, and start the workers, if need be."""
        if self._loaded is None:
            self._loaded = self._load()
            count = self._loaded.workers
            self._waiting = queue.Queue(count)
            self._workers = [
                threading.Thread(
                    target=self._run, args=(self._loaded,), name="encoder", daemon=True
                )
                for _ in range(count)
            ]
            for worker in self._workers:
                worker.start()
        return self._loaded

    def _run(self, loaded: Loaded) -> None:
        if loaded.threads is not None:
            import torch

            torch.set_num_threads(loaded.threads)  # of this thread alone
        while (batch := self._waiting.get()) is not None:
            try:
                if self._error is None:
                    self._encode(loaded, batch.samples)
            except BaseException as error:
                self._error = self._error or error
            batch.samples.clear()
            for release in batch.releases:
                release()
            del batch  # or its samples would stay in memory while the next ones are waited for
