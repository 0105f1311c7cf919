"""Near-duplicate images: the same picture saved again, scaled, or a little changed.

Two images are alike where at most 7 of the 64 bits of their perceptual hashes differ, and their
colours hardly do: figures of one shape in two colours have the same hash. The hash is that of
imagehash's `phash` (https://github.com/JohannesBuchner/imagehash): which of the 8 x 8 lowest
frequencies of the grey image are above their median.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

__all__ = ["Fingerprint", "alike", "fingerprint"]

_SIDE, _LOW = 32, 8  # of the grey image, and of its lowest frequencies
_FAINT = _SIDE**2 / 16  # an eighth of a level of 255: rounding tells these of an even image apart
_DIFFERENT = 7  # bits at most; see `_candidates`
_LEVELS = 12.0  # of 255, the mean difference of colours at most
_BANDS, _BITS = 4, 16  # of a hash
_CROWD = 64  # hashes of alike bands that another is compared with

_COSINES = np.cos(
    np.pi / _SIDE * (np.arange(_SIDE) + 0.5)[None] * np.arange(_LOW)[:, None]
)  # of a discrete cosine transform (type II)


class Fingerprint(NamedTuple):
    """Fingerprint of an image.

    Attributes:
        bits: its perceptual hash.
        colours: of 8 x 8 fields, [8, 8, 3], 0 to 255.
    """

    bits: int
    colours: NDArray[np.int16]


def fingerprint(image: Image.Image) -> Fingerprint:
    """Return the fingerprint of an RGB image."""
    grey = np.asarray(image.convert("L").resize((_SIDE, _SIDE), Image.Resampling.LANCZOS))
    found = _COSINES @ grey.astype(np.float64) @ _COSINES.T
    found[np.abs(found) < _FAINT] = 0.0
    bits = np.packbits((found > np.median(found)).ravel())
    colours = np.asarray(image.resize((8, 8), Image.Resampling.BOX), np.int16)
    return Fingerprint(int.from_bytes(bits.tobytes(), "big"), colours)


def alike(
    prints: Sequence[Fingerprint | None], listed: int = 8
) -> dict[int, list[tuple[int, int]]]:
    """Return number of an image -> (number, different bits) of those like it, nearest first.

    Each has at most `listed` of them. The time is that of a few look-ups an image.
    """
    found: dict[int, list[tuple[int, int]]] = {}
    for one, other in _candidates([None if each is None else each.bits for each in prints]):
        first, second = prints[one], prints[other]
        assert first is not None
        assert second is not None
        different = (first.bits ^ second.bits).bit_count()
        if different > _DIFFERENT:
            continue
        if float(np.abs(first.colours - second.colours).mean()) > _LEVELS:
            continue
        found.setdefault(one, []).append((other, different))
        found.setdefault(other, []).append((one, different))
    return {
        number: sorted(others, key=lambda each: (each[1], each[0]))[:listed]
        for number, others in sorted(found.items())
    }


def _candidates(hashes: Sequence[int | None]) -> Iterator[tuple[int, int]]:
    """Yield pairs (later, earlier) among which are all whose hashes differ in 7 bits at most.

    Of 4 bands of such hashes one differs in 1 bit at most: 17 values to look up. Where these lead
    to more than 64 earlier ones, some are left out: time stays linear where all are alike.
    """
    tables: list[dict[int, list[int]]] = [{} for _ in range(_BANDS)]
    flips = [0, *(1 << bit for bit in range(_BITS))]
    for number, value in enumerate(hashes):
        if value is None:
            continue
        earlier: set[int] = set()
        for place, table in enumerate(tables):
            band = value >> place * _BITS & (1 << _BITS) - 1
            room = _CROWD
            for flip in flips:
                near = table.get(band ^ flip, ())[-room:] if room > 0 else ()
                earlier.update(near)
                room -= len(near)
            table.setdefault(band, []).append(number)
        for other in sorted(earlier):
            yield number, other
