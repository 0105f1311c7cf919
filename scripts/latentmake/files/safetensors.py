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

from latentmake.files.regular import open_regular

__all__ = ["Head", "Tensor", "holds_numbers", "not_finite", "parse_head", "read_head"]

_FIRST_READ = 4096  # bytes, more than most headers take
_MAX_HEADER = 100_000_000  # the format's own limit, in bytes
_PART = 1 << 16  # numbers that are looked at together, in the processor's cache
# Whatever reading an odd JSON value may raise.
_DAMAGE = (ValueError, LookupError, AttributeError, TypeError, ArithmeticError, RecursionError)
# dtype -> its bits, and those of the exponent.
_EXPONENTS = {"BF16": (16, 0x7F80), "F16": (16, 0x7C00), "F32": (32, 0x7F800000)}


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
    """Yield the names of the tensors of 16 or 32 bits that hold NaN or infinite values.

    A number of the format is not finite where all bits of its exponent are set.
    """
    head = read_head(path)
    with path.open("rb") as file:
        for name, tensor in head.tensors.items():
            if tensor.dtype not in _EXPONENTS:
                continue
            file.seek(len(head.data) + tensor.start)
            if not holds_numbers(tensor.dtype, file.read(tensor.end - tensor.start)):
                yield name


def holds_numbers(dtype: str, data: bytes | memoryview) -> bool:
    """Whether none of a tensor's values is NaN or infinite, as far as it has 16 or 32 bits."""
    import numpy as np  # planning reads headers alone, and does without

    if dtype not in _EXPONENTS:
        return True
    bits, pattern = _EXPONENTS[dtype]
    mask = np.dtype(f"<u{bits // 8}").type(pattern)
    numbers = np.frombuffer(data, mask.dtype)
    parts = (numbers[start : start + _PART] for start in range(0, len(numbers), _PART))
    return not any((part & mask).max() == mask for part in parts)
