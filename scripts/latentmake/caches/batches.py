"""Batches of samples of one shape, for an encoder."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from latentmake.caches.inputs import Sample
from latentmake.caches.pipeline import Release

_SHAPES = 4  # full batches of other shapes that may wait


class Batches:
    """Collects samples by their shapes.

    Args:
        encode: takes samples of one shape, and what to call when they are no longer in memory.
        size: tells how many of a shape it takes at once.
    """

    def __init__(
        self,
        encode: Callable[[list[Sample], Sequence[Release]], None],
        size: Callable[[tuple[int, ...]], int],
    ) -> None:
        self._encode = encode
        self._size = size
        self._waiting: dict[tuple[int, ...], tuple[list[Sample], list[Release]]] = {}

    def add(self, sample: Sample, release: Release = bool) -> None:
        """Add a sample; `release` is called when it is encoded and no longer in memory."""
        samples, releases = self._waiting.setdefault(sample.shape, ([], []))
        samples.append(sample)
        releases.append(release)

    def encode_full(self) -> None:
        """Encode batches that are complete, and the largest where many samples wait."""
        for shape in list(self._waiting):
            if len(self._waiting[shape][0]) >= self._size(shape):
                self._flush(shape)
        largest = max(self._waiting, key=lambda shape: len(self._waiting[shape][0]), default=None)
        if largest is not None and sum(map(len, self._samples())) > _SHAPES * self._size(largest):
            self._flush(largest)

    def _samples(self) -> Iterator[list[Sample]]:
        return (samples for samples, _ in self._waiting.values())

    def flush(self) -> None:
        """Encode all that waits."""
        for shape in list(self._waiting):
            self._flush(shape)

    def _flush(self, shape: tuple[int, ...]) -> None:
        self._encode(*self._waiting.pop(shape))
