"""Cache files read at once, in pieces that stay in the processor's cache: whether they are sound.

A header with checksums is compared as bytes; the bytes of its tensors are hashed, and searched for
NaN and zeros, as they are read. The reason why a file is not sound is for `files/verified.py`.
"""

from __future__ import annotations

import json
import mmap
import os
import re
import struct
import threading
from collections.abc import Iterator
from typing import NamedTuple

from latentmake.files import checksums, npz
from latentmake.files.safetensors import FLOATS, largest

NPY = re.compile(
    rb"\x93NUMPY(?:\x01.{3}|[\x02\x03].{5})\{'descr': '([^']+)', 'fortran_order': (?:True|False), "
    rb"'shape': \(([\d, ]*)\), \} *\n",
    re.DOTALL,
)
"""The header of a member of an npz file, with numpy's dtype and the shape."""
DTYPES = {"<f2": "F16", "<f4": "F32", "<f8": "F64", "<i4": "I32", "<i8": "I64", "|b1": "BOOL"}
"""numpy's dtype -> name in safetensors."""

_PIECE = 1 << 19  # bytes that are read and hashed at a time
_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK  # so that a pipe is no endless wait
_HEADER_OF_ARRAY = 256  # bytes that hold the header of an array
_own = threading.local()


class _Segment(NamedTuple):
    """A part of a file that belongs to its checksum; dtype "" where its values are no numbers."""

    start: int
    end: int
    dtype: str


def read_intact(
    path: str | os.PathLike[str], key: str | None = None, *, values: bool = False
) -> int | None:
    """Return the size of a file that has its checksums; None for any other.

    Args:
        path: of the file.
        key: that its header must have, if given.
        values: whether values are looked at too: None where one is NaN or infinite, or a tensor
            is all zeros.

    Raises:
        OSError: it is gone or cannot be read.
    """
    buffer: memoryview | None = getattr(_own, "buffer", None)
    if buffer is None:
        # Whole pages are read into faster; a forked process has its own.
        buffer = _own.buffer = memoryview(mmap.mmap(-1, _PIECE, mmap.MAP_PRIVATE))
    file = os.open(path, _FLAGS)
    try:
        size = os.fstat(file).st_size
        try:
            got = os.readv(file, [buffer])
        except (IsADirectoryError, BlockingIOError):
            return None

        def read(start: int, length: int) -> bytes | memoryview:
            if start + length <= got:
                return buffer[start : start + length]
            return os.pread(file, length, start)

        try:
            if buffer[: len(npz.MAGIC)] == npz.MAGIC:
                archive = npz.Archive(read, size)
                header, segments = archive.rest, list(_arrays(archive, read))
            else:
                length = 8 + struct.unpack_from("<Q", buffer)[0]
                if length > got:
                    return None
                header = bytes(buffer[8:length])
                segments = _tensors(header, length, size)
        except (ValueError, LookupError, AttributeError, TypeError, RecursionError):
            return None
        found = checksums.STAMPED.search(header)
        if found is None or (key is not None and found[3] != key.encode()):
            return None
        if not checksums.header_is_intact(header, found):
            return None
        digits = _hashed(file, segments, buffer, got, values)
        return size if digits == found[1][-32:] else None
    finally:
        os.close(file)


def _tensors(header: bytes, place: int, size: int) -> list[_Segment]:
    """Return the tensors of a safetensors file, without a gap; ValueError where there is one."""
    entries = json.loads(header)
    entries.pop("__metadata__", None)
    found = []
    for entry in entries.values():
        start, end = entry["data_offsets"]
        found.append(_Segment(place + start, place + end, entry["dtype"]))
    found.sort()
    for segment in found:
        if segment.start != place or segment.end < place:
            raise ValueError("has a damaged header")
        place = segment.end
    if place != size:
        raise ValueError("is cut short or has grown")
    return found


def _arrays(archive: npz.Archive, read: npz.Read) -> Iterator[_Segment]:
    """Yield header and numbers of each array; ValueError for a member that is compressed."""
    for start, end, deflated in archive.spans.values():
        found = NPY.match(read(start, min(end - start, _HEADER_OF_ARRAY)))
        if deflated or found is None:
            raise ValueError("is no array as we write it")
        yield _Segment(start, start + found.end(), "")
        yield _Segment(start + found.end(), end, DTYPES.get(found[1].decode(), ""))


def _hashed(
    file: int, segments: list[_Segment], buffer: memoryview, got: int, values: bool
) -> bytes | None:
    """Return the checksum of segments, None where one ends early or its values are suspicious.

    `got` is the number of the file's first bytes that are in the buffer already.
    """
    import xxhash

    found = xxhash.xxh3_128()
    for done, end, dtype in segments:
        number, exponent = FLOATS.get(dtype, (8, 0))
        seeks = values and exponent and end > done
        zero = bool(seeks)
        if not seeks and done < end <= got:  # most of the time: a whole, small array
            found.update(buffer[done:end])
            continue
        while done < end:
            piece = buffer[done : min(end, got)] if done + 8 <= got else None
            if piece is None or len(piece) == 0:
                got = 0
                piece = buffer[: os.preadv(file, [buffer[: end - done]], done)]
            if done + len(piece) < end:
                piece = piece[: len(piece) // 8 * 8]  # numbers stay in one piece
            if not len(piece):
                return None
            found.update(piece)
            if seeks:
                top = largest(piece, number, exponent)
                if top is None:
                    return None
                zero = zero and top == 0
            done += len(piece)
        if zero:
            return None
    return found.hexdigest().encode()
