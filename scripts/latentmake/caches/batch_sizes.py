"""Batch sizes of an encoder on a GPU, found while it encodes.

A batch grows from one sample, to twice as many at a time, while samples per second grow and memory
suffices. The size that was found for a shape is remembered by device and encoder in a small file,
and is where a similar shape begins.
"""

from __future__ import annotations

import json
import math
import operator
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from latentmake.errors import StorageError
from latentmake.files import atomic

WORTH = 1.05
"""Growth of samples per second for which a batch is doubled again.

Where a batch of n takes a + b n seconds, at least 95% of the rate of endless batches are reached.
"""
MARGIN = 1.1
"""Memory that must be free for a batch, as a multiple of what it is expected to take."""

_MEASURED = 2  # batches of a size, after the first, in which libraries choose their kernels
_SIMILAR = 4  # ratio of the elements of two shapes
_ENCODERS, _SHAPES = 64, 128  # in the file
_PLACE = Path(".latentmake/batch_sizes.json")

Shape = tuple[int, ...]


class Found(NamedTuple):
    """Batch size of a shape.

    Attributes:
        size: samples in a batch.
        taken: bytes that it takes besides the weights; 0: unknown.
        needed: bytes that twice as many would take; 0: they would be no faster.
    """

    size: int
    taken: int = 0
    needed: int = 0


class Remembered:
    """Batch sizes in a file, of one encoder on one device.

    A damaged file counts as an empty one. Of jobs that write at the same time one may lose what it
    found, and will find it again.

    Args:
        name: of the encoder and the device.
        path: of the file.
    """

    def __init__(self, name: str, path: Path = _PLACE) -> None:
        self._name = name
        self._path = path

    def read(self) -> dict[Shape, Found]:
        """Return what was found, by shape."""
        found: dict[Shape, Found] = {}
        for text, numbers in self._all().get(self._name, {}).items():
            try:
                shape = tuple(int(each) for each in text.split("x") if each)
                each = Found(*map(operator.index, numbers))
            except (TypeError, ValueError):
                continue
            if each.size > 0 and min(each) >= 0:
                found[shape] = each
        return found

    def write(self, found: Mapping[Shape, Found]) -> None:
        """Remember what was found, in place of what was remembered of these shapes."""
        every = self._all()
        mine = every.pop(self._name, {})
        mine |= {"x".join(map(str, shape)): list(each) for shape, each in found.items()}
        every[self._name] = dict([*mine.items()][-_SHAPES:])
        try:
            atomic.write(self._path, json.dumps(dict([*every.items()][-_ENCODERS:])).encode())
        except (OSError, StorageError):
            return  # it is found again

    def _all(self) -> dict[str, dict[str, list[int]]]:
        try:
            every = json.loads(self._path.read_bytes())
        except (OSError, ValueError, RecursionError):
            return {}
        if not isinstance(every, dict):
            return {}
        return {name: each for name, each in every.items() if isinstance(each, dict)}


@dataclass
class _Trial:
    """A batch size being tried.

    Attributes:
        size: samples in a batch.
        most: samples for which memory may suffice.
        taken: bytes that a batch took besides the weights, at the most.
        batches: number that were encoded.
        seconds: of the fastest but the first.
        rate: samples per second of half the size.
        settled: whether no other size will be tried.
    """

    size: int
    most: int
    taken: int = 0
    batches: int = 0
    seconds: float = math.inf
    rate: float = 0.0
    settled: bool = False

    @property
    def fits(self) -> Found | None:
        """Its size, if a batch of that size or of half of it was encoded."""
        known = self.taken or self.batches or self.rate
        return Found(self.size, self.taken) if known else None

    def resize(self, size: int, *, settled: bool) -> None:
        if size != self.size:
            self.taken = self.taken * size // self.size if size < self.size else 0
        self.size, self.settled = size, settled
        self.batches, self.seconds = 0, math.inf


class BatchSizes:
    """Number of samples in a batch, by their shape; for several threads.

    Args:
        most: samples in a batch, at the most.
        free: bytes of memory that are free for a batch; None: unknown.
        remembered: where sizes are kept.
    """

    def __init__(
        self, most: int, *, free: int | None = None, remembered: Remembered | None = None
    ) -> None:
        self._most = most
        self._free = free
        self._remembered = remembered
        self._found = {} if remembered is None else remembered.read()
        self._trials: dict[Shape, _Trial] = {}
        self._lock = threading.Lock()

    def of(self, shape: Shape) -> int:
        """Return the number of samples of a shape to encode at once."""
        with self._lock:
            return self._trial(shape).size

    def launched(self, shape: Shape, count: int, taken: int, free: int) -> None:
        """Learn what memory a batch took at the most and what was free before, in bytes."""
        with self._lock:
            self._free = free
            trial = self._trial(shape)
            if count == trial.size:
                trial.taken = max(trial.taken, taken)

    def encoded(self, shape: Shape, count: int, seconds: float) -> None:
        """Learn for how many seconds the device worked on a batch."""
        with self._lock:
            trial = self._trial(shape)
            if count != trial.size or trial.settled:
                return
            trial.batches += 1
            if trial.batches > 1:
                trial.seconds = min(trial.seconds, seconds)
            if trial.batches > _MEASURED:
                self._judge(shape, trial)

    def out_of_memory(self, shape: Shape, count: int) -> None:
        """Learn that memory does not suffice for a batch."""
        with self._lock:
            trial = self._trial(shape)
            trial.most = min(trial.most, max(count // 2, 1))
            if trial.size > trial.most:
                trial.resize(trial.most, settled=True)
                self._remember(shape, trial, needed=round((self._free or 0) * MARGIN))

    def _judge(self, shape: Shape, trial: _Trial) -> None:
        rate = trial.size / max(trial.seconds, 1e-9)
        if trial.rate and rate < WORTH * trial.rate:
            trial.resize(trial.size if rate > trial.rate else trial.size // 2, settled=True)
            self._remember(shape, trial, needed=0)
            return
        needed = round(2 * trial.taken * MARGIN)
        if 2 * trial.size > trial.most:
            trial.settled = True
            self._remember(shape, trial, needed=0)
        elif self._free is not None and needed > self._free:
            trial.settled = True
            self._remember(shape, trial, needed=needed)
        else:
            trial.rate = rate
            trial.resize(2 * trial.size, settled=False)

    def _remember(self, shape: Shape, trial: _Trial, *, needed: int) -> None:
        self._found[shape] = Found(trial.size, trial.taken, needed)
        if self._remembered is not None:
            self._remembered.write({shape: self._found[shape]})

    def _trial(self, shape: Shape) -> _Trial:
        if shape not in self._trials:
            self._trials[shape] = self._begun(shape)
        return self._trials[shape]

    def _begun(self, shape: Shape) -> _Trial:
        """Begin with what is remembered of a shape, or of a similar one, as far as it fits."""
        found = self._found.get(shape)
        settled = found is not None and not 0 < found.needed <= (self._free or 0)
        found = found or self._like(shape)
        size = min(found.size, self._most)
        while (
            size > 1
            and self._free is not None
            and size * found.taken * MARGIN > (self._free * found.size)
        ):
            size //= 2
        return _Trial(size, self._most, settled=settled and size == found.size)

    def _like(self, shape: Shape) -> Found:
        """Return a size at which a batch is hardly larger than one of a similar shape."""
        tried = {other: trial.fits for other, trial in self._trials.items() if trial.fits}
        found = tried | self._found
        own = max(math.prod(shape), 1)
        ratios = {
            other: own / max(math.prod(other), 1) for other in found if len(other) == len(shape)
        }
        near = [each for each in ratios if 1 / _SIMILAR <= ratios[each] <= _SIMILAR]
        if not shape or not near:
            return Found(1)
        other = min(near, key=lambda each: abs(math.log(ratios[each])))
        size = MARGIN * found[other].size / ratios[other]
        return Found(2 ** int(math.log2(size)), found[other].taken) if size >= 2 else Found(1)
