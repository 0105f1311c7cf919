"""Batches of samples of one shape, for an encoder."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from latentmake.caches.inputs import Sample

__all__ = ["Batches"]

Release = Callable[[], object]


class Batches:
    """Collects samples by their shapes.

    Args:
        encode: encodes samples of one shape.
        size: tells how many it takes at once.
    """

    def __init__(self, encode: Callable[[list[Sample]], None], size: Callable[[], int]) -> None:
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
            if len(self._waiting[shape][0]) >= self._size():
                self._flush(shape)
        if self._waiting and sum(map(len, self._samples())) > 4 * self._size():
            self._flush(max(self._waiting, key=lambda shape: len(self._waiting[shape][0])))

    def _samples(self) -> Iterator[list[Sample]]:
        return (samples for samples, _ in self._waiting.values())

    def flush(self) -> None:
        """Encode all that waits."""
        for shape in list(self._waiting):
            self._flush(shape)

    def _flush(self, shape: tuple[int, ...]) -> None:
        samples, releases = self._waiting.pop(shape)
        self._encode(samples)
        samples.clear()
        for release in releases:
            release()
