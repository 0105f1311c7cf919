"""Read the header of a safetensors file: metadata, and name, dtype, shape and place of each tensor.

The format: 8 bytes with the header's length (little endian), a JSON header, the tensors' bytes
(https://github.com/huggingface/safetensors#format). The header is read by hand: one small read as a
rule, a check that the file is complete, and about half of the time of the library's `safe_open`.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from latentmake.regular import open_regular

_FIRST_READ = 4096  # bytes, more than most headers take
_MAX_HEADER = 100_000_000  # the format's own limit, in bytes
# Whatever reading an odd JSON value may raise.
_DAMAGE = (ValueError, LookupError, AttributeError, TypeError, ArithmeticError, RecursionError)
FLOATS = {"BF16": (2, 0x7F80), "F16": (2, 0x7C00), "F32": (4, 0x7F8 << 20), "F64": (8, 0x7FF << 52)}
"""dtype -> bytes of a number, and the bits of its exponent, which NaN and infinity have all set."""


class Tensor(NamedTuple):
    """A tensor as a header describes it.

    Attributes:
        dtype: the format's name of it (`BF16`).
        start: offset of its first byte behind the header.
        end: likewise of the byte after its last.
    """

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


class Head(NamedTuple):
    """Everything before the first tensor's bytes.

    Attributes:
        data: the bytes themselves: the length, then the JSON.
        metadata: the header's `__metadata__`; values are text in a sound file.
        entries: name of each tensor -> its JSON; planning needs no more of them.
    """

    data: bytes
    metadata: dict[str, Any]
    entries: dict[str, Any]

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors by name; a damaged header raises ValueError."""
        try:
            return {
                name: Tensor(
                    str(entry["dtype"]),
                    tuple(map(int, entry["shape"])),
                    int(entry["data_offsets"][0]),
                    int(entry["data_offsets"][1]),
                )
                for name, entry in self.entries.items()
            }
        except _DAMAGE:
            raise ValueError("has a damaged header") from None


def read_head(path: str | os.PathLike[str]) -> Head:
    """Read the header of a safetensors file, and check that the file is complete.

    Raises:
        ValueError: it is cut short, damaged, no safetensors file, or no regular file at all.
    """
    return _parsed(*_read(path))


def parse_head(data: bytes | memoryview) -> Head:
    """Read the header of a file's bytes; see `read_head`."""
    length = struct.unpack_from("<Q", data)[0] if len(data) >= 8 else _MAX_HEADER
    if length >= _MAX_HEADER or 8 + length > len(data):
        raise ValueError("is cut short or no safetensors file")
    return _parsed(bytes(data[: 8 + length]), len(data))


def _parsed(data: bytes, size: int) -> Head:
    try:
        entries = json.loads(data[8:])
        metadata = entries.pop("__metadata__", {})
        metadata.keys()  # an object
        end = max((int(entry["data_offsets"][1]) for entry in entries.values()), default=0)
    except _DAMAGE:
        raise ValueError("has a damaged header") from None
    if len(data) + end != size:
        raise ValueError("is cut short or has grown")
    return Head(data, metadata, entries)


def _read(path: str | os.PathLike[str]) -> tuple[bytes, int]:
    """Return the bytes before the first tensor, and the size of the file."""
    file, size = open_regular(path)
    with file:
        data = file.read(_FIRST_READ)
        length = struct.unpack_from("<Q", data)[0] if len(data) >= 8 else _MAX_HEADER
        if length >= _MAX_HEADER or 8 + length > size:
            raise ValueError("is cut short or no safetensors file")
        while len(data) < 8 + length:
            more = file.read(8 + length - len(data))
            if not more:
                raise ValueError("is cut short")
            data += more
    return data[: 8 + length], size


def not_finite(path: Path) -> Iterator[str]:
    """Yield the names of the tensors that hold NaN or infinite values, see `holds_numbers`."""
    head = read_head(path)
    with path.open("rb") as file:
        for name, tensor in head.tensors.items():
            if tensor.dtype not in FLOATS:
                continue
            file.seek(len(head.data) + tensor.start)
            if not holds_numbers(tensor.dtype, file.read(tensor.end - tensor.start)):
                yield name


def holds_numbers(dtype: str, data: bytes | memoryview) -> bool:
    """Whether none of a tensor's values is NaN or infinite, as far as it has one of `FLOATS`."""
    return dtype not in FLOATS or largest(data, *FLOATS[dtype]) is not None


def largest(data: bytes | memoryview, number: int, exponent: int) -> int | None:
    """Return the largest value of `number` bytes each, as unsigned ones; None where one is NaN.

    Infinite ones count as NaN, and so do bytes of which a part is left. Without a copy: a number
    that is not finite is above its exponent, as a signed number or, where negative, an unsigned
    one.
    """
    import numpy as np  # planning reads headers alone, and does without

    if len(data) % number:
        return None
    highest = np.maximum.reduce  # what `max` calls, by a detour
    top = int(highest(np.frombuffer(data, f"<u{number}"), initial=0))
    if top >= exponent | 1 << 8 * number - 1:
        return None
    signed = int(highest(np.frombuffer(data, f"<i{number}"), initial=0))
    return None if signed >= exponent else top
