"""Bytes of tensors: dtypes, checksums, and the search for NaN and infinity.

A cache file holds two checksums, of its tensors' bytes and of its header. Both are in no key and no
recipe: a file without them stays fresh. XXH3 takes a small part of the time of reading
(https://github.com/Cyan4973/xxHash), and lets other threads run meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

CHECKSUM, HEADER_CHECKSUM = "latentmake.checksum", "latentmake.header_checksum"
_TENSORS, _HEADER = "xxh3_128:", "xxh3_64:"
_ZEROS = "0" * 16
PLACEHOLDERS = {CHECKSUM: _TENSORS + 2 * _ZEROS, HEADER_CHECKSUM: _HEADER + _ZEROS}
"""Metadata of a file to write, for the checksum of all tensor bytes in the order of the file, and
of the header's JSON in which these digits of its own are zeros."""

# No text in a header fits: JSON escapes quotes.
_PLACE = f'"{HEADER_CHECKSUM}":"{PLACEHOLDERS[HEADER_CHECKSUM]}'.encode()


class Dtype(NamedTuple):
    """Format of a number.

    Attributes:
        name: in torch and in settings.
        size: in bytes.
        exponent: bits of its exponent, which NaN and infinity have all set; 0 of those without.
        numpy: numpy's name in an npz file; "" where it has none.
    """

    name: str
    size: int
    exponent: int = 0
    numpy: str = ""


DTYPES = {
    "BF16": Dtype("bfloat16", 2, 0x7F80),
    "F16": Dtype("float16", 2, 0x7C00, "<f2"),
    "F32": Dtype("float32", 4, 0x7F8 << 20, "<f4"),
    "F64": Dtype("float64", 8, 0x7FF << 52, "<f8"),
    "F8_E4M3": Dtype("float8_e4m3fn", 1),
    "I32": Dtype("int32", 4, numpy="<i4"),
    "I64": Dtype("int64", 8, numpy="<i8"),
    "U8": Dtype("uint8", 1),
    "BOOL": Dtype("bool", 1, numpy="|b1"),
}
"""Name in safetensors -> dtype."""


def filled(
    metadata: Mapping[str, str], pieces: Iterable[bytes | bytearray | memoryview]
) -> dict[str, str]:
    """Return metadata in order, with the checksum of the tensors if it has a place for it."""
    found = dict(sorted(metadata.items()))
    if CHECKSUM in found:
        found |= PLACEHOLDERS | {CHECKSUM: checksum(pieces)}
    return found


def checksum(pieces: Iterable[bytes | bytearray | memoryview]) -> str:
    """Return the checksum of the bytes of a file's tensors."""
    import xxhash  # planning writes no cache file

    found = xxhash.xxh3_128()
    for piece in pieces:
        found.update(piece)
    return f"{_TENSORS}{found.hexdigest()}"


def sealed(header: bytes) -> bytes:
    """Return a header with its own checksum, if it has a place for it."""
    import xxhash

    before, place, after = header.partition(_PLACE)
    if not place:
        return header
    digits = xxhash.xxh3_64_hexdigest(header).encode()
    return b"".join((before, place[: -len(digits)], digits, after))


def is_sealed(header: bytes, seal: object) -> bool:
    """Whether a header has its own checksum, which its metadata says to be `seal`."""
    import xxhash

    digits = str(seal).removeprefix(_HEADER).encode()
    return xxhash.xxh3_64_hexdigest(header.replace(digits, _ZEROS.encode(), 1)).encode() == digits


def is_finite(dtype: str, data: bytes | memoryview) -> bool:
    """Whether none of a tensor's values is NaN or infinite."""
    return largest(dtype, data) is not None


def largest(dtype: str, data: bytes | memoryview) -> int | None:
    """Return the bits of the largest value of floating-point numbers; None where one is NaN.

    Infinite ones count as NaN, and so do bytes of which a part is left; other dtypes give 1.
    Without a copy: a number that is not finite is above its exponent, as a signed number or, where
    negative, an unsigned one.
    """
    import numpy as np  # planning reads headers alone, and does without

    if dtype not in DTYPES or not DTYPES[dtype].exponent:
        return 1
    _, size, exponent, _ = DTYPES[dtype]
    if len(data) % size:
        return None
    highest = np.maximum.reduce  # what `max` calls, by a detour
    top = int(highest(np.frombuffer(data, f"<u{size}"), initial=0))
    if top >= exponent | 1 << 8 * size - 1:
        return None
    signed = int(highest(np.frombuffer(data, f"<i{size}"), initial=0))
    return None if signed >= exponent else top
