"""Verdicts on samples that do not fit into memory, even alone: the item's fault or the device's.

Another program may fill a GPU for a while. Items that come then must not count as faulty: with
`on_error: skip` a run would be trained without them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

from latentmake.caches.encoders import Encoder, Loaded
from latentmake.caches.inputs import Sample

Results = list[tuple[dict[str, Any], dict[str, str]]]

Size = tuple[int, ...]
"""Frames and pixels of an image or clip; the numbers of tokens of a caption."""

Again = Callable[[list[Sample]], object]
"""Encodes samples of before once more; None if they do not fit now."""

_CROWDED = 4  # other programs hold a device if they have one part in so many of its memory
_IN_A_ROW = 8  # samples that do not fit, none between them: then others are not tried


class Verdict(NamedTuple):
    """What to do with a sample that does not fit.

    Attributes:
        refuse: count the item as faulty.
        stop: why the device is at fault: the job must stop. With neither, the sample is tried
            again when the others of the order are done.
    """

    refuse: bool = False
    stop: str = ""


class Shortages:
    """Judges samples that do not fit, by those that a process has encoded; for several threads.

    It is the device's fault if a sample as large was encoded before. A larger one is put off until
    the rest of the order is done: so one huge image stops no job, wherever in the order it comes,
    and a device that is full for a while costs no item. It is the item's fault if it does not fit
    then either, and another one was encoded in between, or no other program holds much of the
    memory, or one of before can be encoded once more. Where nothing fits at all, only a single item
    can be at fault, or one that an earlier build has named.
    """

    def __init__(self) -> None:
        self._encoded: set[Size] = set()
        self._last: Sample | None = None
        self._batches = 0
        self._put_off: dict[str, int] = {}  # key -> batches that were encoded before
        self._in_a_row = 0
        self._most: dict[tuple[int, ...], int] = {}
        self._lock = threading.Lock()

    def most(self, shape: tuple[int, ...], size: int) -> int:
        """Return the batch size of a shape, if `size` is not too large."""
        return min(size, self._most.get(shape, size))

    def halved(self, shape: tuple[int, ...], half: int) -> None:
        """Learn that memory suffices for half of a batch at the most."""
        with self._lock:
            self._most[shape] = self.most(shape, half)

    def encoded(self, sample: Sample) -> None:
        """Learn that a sample was encoded."""
        with self._lock:
            self._encoded.add(sample.size)
            if isinstance(sample.content, str) or len(sample.shape) == 3:  # clips are too large
                self._last = sample
            self._batches += 1
            self._in_a_row = 0

    def judge(
        self,
        sample: Sample,
        again: Again,
        *,
        alone: bool,
        sure: bool,
        known: bool,
    ) -> Verdict:
        """Judge a sample that does not fit.

        Args:
            sample: that does not fit.
            again: encodes one of before once more.
            alone: whether its order has no other target, behind which it could be put off.
            sure: whether the library's words can mean nothing but a lack of memory.
            known: whether an earlier build has skipped the item.
        """
        from latentmake.caches.encoders.device import held_by_others

        key, size = sample.key, sample.size
        with self._lock:
            if any(all(a >= b for a, b in zip(each, size, strict=True)) for each in self._encoded):
                return Verdict(stop="though one as large was encoded before")
            first = key not in self._put_off
            before = self._put_off.setdefault(key, self._batches)
            self._in_a_row += first
            if first and not alone and self._in_a_row < _IN_A_ROW:
                return Verdict()
            if before < self._batches:
                return Verdict(refuse=True)
            last, is_only = self._last, len(self._put_off) == 1
        others, total = held_by_others()
        is_crowded = others * _CROWDED >= total
        is_idle = sure and not is_crowded
        if self._encoded:
            if is_idle or (last is not None and again([last]) is not None):
                return Verdict(refuse=True)
            return Verdict(stop="and one that was encoded before does not fit any more")
        if (is_idle and is_only) or known:
            return Verdict(refuse=True)
        stop = "and no smaller one was encoded"
        if is_crowded:
            stop += f", while other programs hold {others / 1e9:.1f} of {total / 1e9:.1f} GB"
        return Verdict(stop=stop)


class _Run(Protocol):
    def __call__(
        self, encode: Encoder, samples: list[Sample], *, alone: bool = False
    ) -> Results: ...


def encode_in_parts(
    loaded: Loaded,
    samples: list[Sample],
    run: _Run,
    shortages: Shortages,
    say: Callable[[str], None],
) -> Iterator[tuple[list[Sample], Results | None, str]]:
    """Encode samples of one shape, as many at once as memory suffices for.

    Out of memory: retry with half of them, with one while no other worker encodes, and with it in
    the frugal way: no target's bytes depend on how much memory was free.

    Yields:
        Samples with their results; or one with None, if it does not fit, and the library's words.
    """
    from latentmake.caches.encoders.device import attempt

    groups, shape = [samples], samples[0].shape
    while groups:
        group = groups.pop()
        size = shortages.most(shape, len(group))
        if len(group) > size:
            groups += [group[size:], group[:size]]
            continue
        results, words = attempt(run, loaded.encode, group)
        if results is None and len(group) > 1:
            half = len(group) // 2
            shortages.halved(shape, half)
            say(f"out of memory with {len(group)} at once: trying half as many")
            groups += [group[half:], group[:half]]
            continue
        if results is None:  # what it held is free now, also for buffers of libraries
            results, words = attempt(run, loaded.encode, group, alone=True)
        if results is None and loaded.frugal is not None:
            say(f"out of memory with one of {shape}: trying it in less memory")
            results, words = attempt(run, loaded.frugal, group, alone=True)
        if results is not None:
            shortages.encoded(group[0])
        yield group, results, words
