"""Account of a job's time: whether reading, encoding or writing keeps it from being faster.

Only workers are watched. Where one is idle, nothing was read for it; where all are busy and the
device is not, they write. On a CPU the device is the cores, which reading takes from encoding.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

_SHORTEST = 5.0  # seconds of encoding below which chance decides
_IDLE = 0.15  # share of time in which the bottleneck of a pipeline may wait for others
_BUSY_CORES, _IDLE_CORES = 0.75, 0.5  # shares of its processor time
_CROWDED = 1.5  # load of a core above which threads do not wait for storage alone


def _load() -> float:
    return os.getloadavg()[0] / (os.cpu_count() or 1)  # both of the whole machine


class Clocks(NamedTuple):
    """Clocks in seconds: of the wall, of the processor time of this thread and of all threads.

    `load` is the number of threads of all programs that want a core, a core.
    """

    wall: Callable[[], float] = time.perf_counter
    thread: Callable[[], float] = time.thread_time
    process: Callable[[], float] = time.process_time
    load: Callable[[], float] = _load


class Stages:
    """Seconds of each stage of a job, from the first encoded sample to the last written one.

    Args:
        threads: cores that the job may use.
        clocks: to read the time from.

    Attributes:
        clocks: the same.
    """

    def __init__(self, threads: int = 1, clocks: Clocks | None = None) -> None:
        self.clocks = clocks or Clocks()
        self._threads = threads
        self._lock = threading.Lock()
        self._workers, self._queues = 0, False  # none where another program encodes
        self._encoders = self._writers = 0  # workers that do so now
        self._last: float | None = None  # when that changed
        self._used = 0.0  # processor time of all threads before
        self._encoding = self._reading = self._writing = 0.0  # seconds of all slots of the device
        self._own = 0.0  # processor time of workers, at most
        self._lost = 0.0  # seconds in which encoding waited for a core

    def begin(self, workers: int, queues: bool) -> None:
        """Note how many workers there are, and whether the device queues what they encode.

        Where it does not, each worker is a part of the device.
        """
        self._workers, self._queues = workers, queues

    def encoding(self) -> _Stage:
        """Return a context in which a worker encodes, from the call to the results."""
        return (_Stage if self._queues else _Shared)(self, 1, 0)

    def writing(self) -> _Stage:
        """Return a context in which a worker checks, serializes and writes results."""
        return _Stage(self, 0, 1)

    def change(self, encoders: int, writers: int, own: float = 0.0, lost: float = 0.0) -> float:
        """Note that so many more workers encode or write now; return the time.

        `own` is the processor time of a worker that encoded, and `lost` what it waited for a core.
        """
        with self._lock:
            now = self.clocks.wall()
            if self._last is None:
                self._used = self.clocks.process()
            else:
                self._pass(now - self._last)
            self._last = now
            self._encoders += encoders
            self._writers += writers
            self._own += own
            self._lost += lost
            return now

    def _pass(self, seconds: float) -> None:
        slots = self._slots
        busy = min(slots, self._encoders)
        unfed = min(slots - busy, max(0, self._workers - self._encoders - self._writers))
        self._own += seconds * self._writers
        self._encoding += seconds * busy
        self._reading += seconds * unfed
        self._writing += seconds * (slots - busy - unfed)

    @property
    def _slots(self) -> int:
        """Parts of the device, each of which is busy or not."""
        return 1 if self._queues else self._workers

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds of the device in each stage; their sum is the time since the first sample.

        None where another program encodes.
        """
        with self._lock:
            if not (slots := self._slots):
                return {}
            # Other programs take cores too: reading took no more than the time that it used.
            taken = 0.0 if self._queues else min(self._lost, self._encoding, self._others)
            found = {
                "reading": self._reading + taken,
                "encoding": self._encoding - taken,
                "writing": self._writing,
            }
        return {stage: each / slots for stage, each in found.items()}

    @property
    def _cores(self) -> float:
        """Processor time of all threads."""
        return self.clocks.process() - self._used

    @property
    def _others(self) -> float:
        """Processor time of all threads but the workers."""
        return max(0.0, self._cores - self._own)

    @property
    def bottleneck(self) -> str:
        """The stage that keeps the job from being faster."""
        found = self.seconds
        waited = {"reading": self._reading / self._slots}
        if self._queues:  # elsewhere the device itself writes
            waited["writing"] = self._writing
        if sum(waited.values()) > _IDLE * sum(found.values()):
            found = waited
        return max(found, key=found.__getitem__)

    @property
    def words(self) -> str:
        """Share of the time that the device was busy, and the bottleneck; "" of a short job."""
        found = self.seconds
        total = sum(found.values())
        if total < _SHORTEST:
            return ""
        return f"device busy {found['encoding'] / total:.0%}, bottleneck: {self.bottleneck}"

    @property
    def hint(self) -> str:
        """A hint against the bottleneck, as the end of a line; "" where none is known."""
        total = sum(self.seconds.values())
        if total < _SHORTEST or self.bottleneck == "encoding":
            return ""
        cores = self._cores / total / self._threads
        if cores > _BUSY_CORES:
            return " (all its cores are busy: give it more)"
        if self.clocks.load() > _CROWDED:
            return " (other programs take its cores)"
        return f" (slow storage: its cores are {1 - cores:.0%} idle)" if cores < _IDLE_CORES else ""


class _Stage:
    """A worker's stay in a stage."""

    __slots__ = ("_began", "_encoders", "_of", "_used", "_writers")

    def __init__(self, of: Stages, encoders: int, writers: int) -> None:
        self._of, self._encoders, self._writers = of, encoders, writers

    def __enter__(self) -> None:
        self._of.change(self._encoders, self._writers)

    def __exit__(self, *error: object) -> None:
        self._of.change(-self._encoders, -self._writers)


class _Shared(_Stage):
    """A worker's stay in encoding on cores that others use too."""

    __slots__ = ()

    def __enter__(self) -> None:
        self._used = self._of.clocks.thread()
        self._began = self._of.change(self._encoders, self._writers)

    def __exit__(self, *error: object) -> None:
        own = self._of.clocks.thread() - self._used
        lost = max(0.0, self._of.clocks.wall() - self._began - own)
        self._of.change(-self._encoders, -self._writers, own, lost)
