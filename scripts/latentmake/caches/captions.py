"""Batches of captions for a text encoder, longest first."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Sequence

from latentmake.caches.encoders import Loaded
from latentmake.caches.inputs import Sample
from latentmake.caches.pipeline import Release

_WAITING = 512  # captions among which those of like length are found
_STEP = 16  # tokens by which the lengths of batches differ, so that few sizes have to be learnt


class CaptionBatches:
    """Collects captions by their numbers of tokens.

    Those of like length go together, so that little padding is encoded, and the longest go first:
    if memory does not suffice for them, it shows at once. Captions of an encoder that tells no
    lengths go in their order.

    Args:
        encode: takes samples of one shape, and what to call when they are no longer in memory.
        loaded: returns the encoder, which is loaded for the first caption.
    """

    def __init__(
        self,
        encode: Callable[[list[Sample], Sequence[Release]], None],
        loaded: Callable[[], Loaded],
    ) -> None:
        self._encode = encode
        self._loaded = loaded
        self._waiting: list[Sample] = []

    def add(self, sample: Sample) -> None:
        """Add a caption."""
        lengths = self._loaded().lengths
        if lengths is not None:
            sample = sample._replace(tokens=lengths(str(sample.content)))
        insort(self._waiting, sample, key=_longest_first)

    def encode_full(self) -> None:
        """Encode the longest where enough captions wait."""
        loaded = self._loaded()
        most = loaded.size_of(()) if loaded.lengths is None else _WAITING
        while len(self._waiting) >= most:
            self._encode_longest(loaded)

    def flush(self) -> None:
        """Encode all that wait."""
        while self._waiting:
            self._encode_longest(self._loaded())

    def _encode_longest(self, loaded: Loaded) -> None:
        shape = self._waiting[0].tokens
        if loaded.alike is not None:
            most = loaded.alike(shape)
            some = [each for each in self._waiting[:most] if each.tokens == shape]
        else:
            some = self._waiting[: loaded.size_of(_rounded(shape))]
            shape = _rounded(
                [max(each) for each in zip(*(one.tokens for one in some), strict=True)]
            )
        del self._waiting[: len(some)]
        self._encode([each._replace(tokens=shape) for each in some], ())


def _longest_first(sample: Sample) -> tuple[int, ...]:
    return tuple(-tokens for tokens in sample.tokens)


def _rounded(lengths: Sequence[int]) -> tuple[int, ...]:
    return tuple(-(-length // _STEP) * _STEP for length in lengths)
