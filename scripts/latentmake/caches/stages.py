"""Account of a job's time: whether reading, encoding or writing keeps it from being faster."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

_SHORTEST = 5.0  # seconds below which chance decides
_BUSY = 0.85  # share of time from which the device itself is the bottleneck


class Stages:
    """Seconds in which the workers of a job encode and write, from its first sample on.

    A GPU works for one worker at a time; on a CPU each worker is a part of the device. Workers that
    do neither wait for something to be read.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seconds = {"encoding": 0.0, "writing": 0.0}
        self._workers, self._queues = 0, False  # none where another program encodes
        self._began = self._ended = 0.0

    def begin(self, workers: int, queues: bool) -> None:
        """Note how many workers there are, and whether they share one device."""
        self._workers, self._queues = workers, queues

    @contextlib.contextmanager
    def of(self, stage: str) -> Iterator[None]:
        """A worker's stay in `encoding` (or its wait for results), or in `writing`."""
        began = time.perf_counter()
        try:
            yield
        finally:
            ended = time.perf_counter()
            with self._lock:
                self._began = self._began or began
                self._ended = ended
                self._seconds[stage] += ended - began

    @property
    def words(self) -> str:
        """Share of the time that the device was busy, and the bottleneck; "" of a short job."""
        passed = self._ended - self._began
        if not self._workers or passed < _SHORTEST:
            return ""
        encoding, writing = self._seconds["encoding"], self._seconds["writing"]
        busy = min(1.0, encoding / passed / (1 if self._queues else self._workers))
        reading = passed * self._workers - encoding - writing
        bottleneck = "encoding" if busy > _BUSY else "reading" if reading > writing else "writing"
        return f"device busy {busy:.0%}, bottleneck: {bottleneck}"
