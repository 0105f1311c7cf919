"""safetensors files: their headers, the dtypes of tensors, and our checksums.

The format: 8 bytes with the header's length (little endian), a JSON header, the tensors' bytes
(https://github.com/huggingface/safetensors#format). The header is read here, usually by one small
read, and the file is checked to be complete. The library's `safe_open` takes about twice as long.

Each cache file, including npz files, has two checksums: one of its tensors' bytes, one of its
header. They are part of no key and no recipe, so a file without them stays fresh. XXH3 takes a
small part of the time of reading (https://github.com/Cyan4973/xxHash), and releases the GIL.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from latentmake.base.regular import open_regular

CHECKSUM, HEADER_CHECKSUM = "latentmake.checksum", "latentmake.header_checksum"
_TENSORS, _HEADER = "xxh3_128:", "xxh3_64:"
_ZEROS = "0" * 16
PLACEHOLDERS = {CHECKSUM: _TENSORS + 2 * _ZEROS, HEADER_CHECKSUM: _HEADER + _ZEROS}
"""Metadata of a file before its checksums are known. The first checksum covers the bytes of all
tensors in the order of the file. The second covers the header, with its own digits as zeros."""

# This matches only the real entry: in the text of a value, JSON would escape the quotes.
_PLACE = f'"{HEADER_CHECKSUM}":"{PLACEHOLDERS[HEADER_CHECKSUM]}'.encode()

_POINTER = b"version https://git-lfs"
POINTER = "is a pointer of git-lfs, not the file itself: run `git lfs pull` where it lies"
"""Fault of a file that was cloned without its content."""

_FIRST_READ = 4096  # bytes, more than most headers take
_MAX_HEADER = 100_000_000  # the format's own limit, in bytes
# Errors that reading an unexpected JSON value may raise.
_DAMAGE = (ValueError, LookupError, AttributeError, TypeError, ArithmeticError, RecursionError)


DTYPES = {
    "I64": "int64",
    "F64": "float64",
    "F32": "float32",
    "I32": "int32",
    "BF16": "bfloat16",
    "F16": "float16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "U8": "uint8",
    "BOOL": "bool",
}
"""Name of a dtype in safetensors -> name in torch and in settings; in safetensors' order."""


class Tensor(NamedTuple):
    """A tensor as a header describes it.

    Attributes:
        dtype: safetensors' name of the dtype, such as `BF16`.
        start: offset of the first byte, counted from the end of the header.
        end: offset of the byte after the last one.
    """

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


class Head(NamedTuple):
    """Start of a file, up to the bytes of the first tensor.

    Attributes:
        data: the bytes: the length, then the JSON.
        metadata: `__metadata__` of the header; in a sound file the values are strings.
        entries: name of a tensor -> its JSON. Planning does not parse it further.
    """

    data: bytes
    metadata: dict[str, Any]
    entries: dict[str, Any]

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Name -> tensor; a damaged header raises ValueError."""
        tensors = {}
        try:
            for name, entry in self.entries.items():
                dtype, (start, end) = str(entry["dtype"]), map(int, entry["data_offsets"])
                tensors[name] = Tensor(dtype, tuple(map(int, entry["shape"])), start, end)
        except _DAMAGE:
            raise ValueError("has a damaged header") from None
        return tensors


def read_head(path: str | os.PathLike[str]) -> Head:
    """Read the header of a safetensors file, and check that the file is complete.

    Raises:
        ValueError: the file is cut short, damaged, or no safetensors file.
        OSError: the file cannot be read.
    """
    file, size = open_regular(path)
    with file:
        data = file.read(_FIRST_READ)
        end = 8 + int.from_bytes(data[:8], "little")
        if len(data) < end <= min(size, _MAX_HEADER):
            data += file.read(end - len(data))
    return parse_head(data, size)


def parse_head(data: bytes | memoryview, size: int | None = None) -> Head:
    """Parse the header in a file's bytes; see `read_head`.

    `data` may be the first bytes of a file of `size` bytes, or by default the complete file.
    """
    size = len(data) if size is None else size
    end = 8 + int.from_bytes(data[:8], "little")
    if end > min(size, _MAX_HEADER):
        pointer = bytes(data[: len(_POINTER)]) == _POINTER
        raise ValueError(POINTER if pointer else "is cut short or no safetensors file")
    head = bytes(data[:end])
    try:
        entries = json.loads(head[8:])
        metadata = entries.pop("__metadata__", {})
        metadata.keys()  # raises an error if it is no JSON object
        last = max((int(entry["data_offsets"][1]) for entry in entries.values()), default=0)
    except _DAMAGE:
        raise ValueError("has a damaged header") from None
    if end + last != size:
        raise ValueError("is cut short or has grown")
    return Head(head, metadata, entries)


def is_pointer(path: Path) -> bool:
    """Whether a file is a pointer of git-lfs."""
    file, _ = open_regular(path)
    with file:
        return file.read(len(_POINTER)) == _POINTER


# -- checksums ------------------------------------------------------------------------------------


def filled(
    metadata: Mapping[str, str], pieces: Iterable[bytes | bytearray | memoryview]
) -> dict[str, str]:
    """Return sorted metadata; a placeholder is replaced by the checksum of the tensors."""
    ordered = dict(sorted(metadata.items()))
    if CHECKSUM in ordered:
        ordered |= PLACEHOLDERS | {CHECKSUM: checksum(pieces)}
    return ordered


def checksum(pieces: Iterable[bytes | bytearray | memoryview]) -> str:
    """Return the checksum of the bytes of a file's tensors."""
    import xxhash  # imported late: planning writes no cache file

    digest = xxhash.xxh3_128()
    for piece in pieces:
        digest.update(piece)
    return f"{_TENSORS}{digest.hexdigest()}"


def sealed(header: bytes) -> bytes:
    """Return a header with its own checksum in the place of the placeholder, if it has one."""
    import xxhash

    before, place, after = header.partition(_PLACE)
    if not place:
        return header
    digits = xxhash.xxh3_64_hexdigest(header).encode()
    return b"".join((before, place[: -len(digits)], digits, after))


def is_sealed(header: bytes, seal: object) -> bool:
    """Whether `seal`, the checksum in the metadata of a header, is the header's own checksum."""
    import xxhash

    digits = str(seal).removeprefix(_HEADER).encode()
    return xxhash.xxh3_64_hexdigest(header.replace(digits, _ZEROS.encode(), 1)).encode() == digits
