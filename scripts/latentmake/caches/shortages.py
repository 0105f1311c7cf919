"""Verdicts on samples that do not fit into memory, even alone: the item's fault or the device's.

Another program may fill a GPU for a while. Items that come then must not count as faulty: with
`on_error: skip` a run would be trained without them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from latentmake.caches.inputs import Sample
from latentmake.caches.job import Job
from latentmake.config.models import Model
from latentmake.errors import DeviceError, is_surely_memory

Size = tuple[int, ...]
"""Frames and pixels of an image or clip; the numbers of tokens of a caption."""

Again = Callable[[list[Sample]], object]
"""Encodes samples of before once more; None if they do not fit now."""

_CROWDED = 4  # other programs hold a device if they have one part in so many of its memory
_IN_A_ROW = 8  # samples that do not fit, none between them: then others are not tried


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

    def judge(self, sample: Sample, words: str, again: Again, job: Job) -> bool:
        """Refuse a sample of a job that does not fit, or put it off; return whether it is refused.

        One that is put off is tried again when the others of the order are done.

        Args:
            sample: that does not fit.
            words: the library's.
            again: encodes one of before once more.
            job: of the sample; where it has no other target, this cannot be put off behind it.

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
        self, sample: Sample, again: Again, alone: bool, sure: bool, known: bool
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
        key = "vae_cache_cpu" if model.spec.video else "vae_tiling"
        if not getattr(model, key):
            hint += f"; `{key}: true` in the model encodes in tiles (and all its latents again)"
    return what, hint
