"""Read the header of a safetensors file: metadata, and name, dtype, shape and place of each tensor.

The format: 8 bytes with the header's length (little endian), a JSON header, the tensors' bytes
(https://github.com/huggingface/safetensors#format). The header is read by hand: one small read as a
rule, a check that the file is complete, and about half of the time of the library's `safe_open`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from latentmake.files.tensor_bytes import is_finite
from latentmake.regular import open_regular

_FIRST_READ = 4096  # bytes, more than most headers take
_MAX_HEADER = 100_000_000  # the format's own limit, in bytes
# Whatever reading an odd JSON value may raise.
_DAMAGE = (ValueError, LookupError, AttributeError, TypeError, ArithmeticError, RecursionError)


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
    file, size = open_regular(path)
    with file:
        data = more = file.read(_FIRST_READ)
        end = 8 + int.from_bytes(data[:8], "little")
        while more and len(data) < end <= min(size, _MAX_HEADER):
            more = file.read(end - len(data))
            data += more
    return parse_head(data, size)


def parse_head(data: bytes | memoryview, size: int | None = None) -> Head:
    """Read the header of a file's first bytes, or of all of them; see `read_head`."""
    size = len(data) if size is None else size
    end = 8 + int.from_bytes(data[:8], "little")
    if end > min(size, _MAX_HEADER):
        raise ValueError("is cut short or no safetensors file")
    head = bytes(data[:end])
    try:
        entries = json.loads(head[8:])
        metadata = entries.pop("__metadata__", {})
        metadata.keys()  # an object
        last = max((int(entry["data_offsets"][1]) for entry in entries.values()), default=0)
    except _DAMAGE:
        raise ValueError("has a damaged header") from None
    if end + last != size:
        raise ValueError("is cut short or has grown")
    return Head(head, metadata, entries)


def not_finite(path: Path) -> Iterator[str]:
    """Yield the names of the tensors that hold NaN or infinite values."""
    head = read_head(path)
    with path.open("rb") as file:
        for name, tensor in head.tensors.items():
            file.seek(len(head.data) + tensor.start)
            if not is_finite(tensor.dtype, file.read(tensor.end - tensor.start)):
                yield name
