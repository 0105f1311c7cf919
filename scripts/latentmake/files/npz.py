"""npz files with their origin in the archive's comment, for trainers that read numpy's archives.

An npz is a ZIP archive of arrays, uncompressed. Its origin is JSON in the archive's comment: numpy
ignores it, and a program that writes the file again leaves it out, so that such a file is no longer
ours. The comment stands at the very end, where one small read finds it and tells whether the file
is complete; zipfile itself would read the directory too.
Formats: https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html, and sections 4.3.7
and 4.3.16 of https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT.
"""

from __future__ import annotations

import io
import json
import os
import re
import struct
import threading
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, BinaryIO

from latentmake.files.safetensors import DTYPES, filled, sealed
from latentmake.regular import open_regular

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAGIC = b"PK\x03\x04"  # the first bytes of an archive that is not empty
_SIGNATURE = b"PK\x05\x06"
_END = struct.Struct("<4s4H2LH")  # of an archive: signature, disks, entries, size, offset, comment
_MEMBER = struct.Struct("<26x2H")  # before a member: lengths of the name and more, which follow
_TAILS = 4096, _END.size + 0xFFFF  # bytes that hold a comment of ours, and the longest
_EPOCH = (1980, 1, 1, 0, 0, 0)  # the earliest that a ZIP archive can say
_ARRAY = re.compile(
    rb"\x93NUMPY(?:\x01.{3}|[\x02\x03].{5})\{'descr': '([^']+)', 'fortran_order': (?:True|False), "
    rb"'shape': \(([\d, ]*)\), \} *\n",
    re.DOTALL,
)
_HEADER_OF_ARRAY = 256  # bytes that hold it
_READING = threading.Lock()  # numpy reads headers by Python's ast, which fails in two threads
_NAMES = {dtype.numpy.encode(): name for name, dtype in DTYPES.items() if dtype.numpy}


def serialize(arrays: Mapping[str, NDArray[Any]], metadata: Mapping[str, str]) -> bytes:
    """Return the bytes of an npz file, the same for the same arrays and metadata.

    Raises:
        ValueError: the metadata take more than 64 KB as JSON.
    """
    from numpy.lib import format as npy

    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for name in sorted(arrays):
            array = io.BytesIO()
            npy.write_array(array, arrays[name], allow_pickle=False)
            entry = zipfile.ZipInfo(f"{name}.npy", _EPOCH)
            entry.create_system, entry.external_attr = 3, 0o644 << 16
            archive.writestr(entry, array.getbuffer())
    return stamped(buffer.getvalue(), metadata)


def stamped(data: bytes, metadata: Mapping[str, str]) -> bytes:
    """Return an archive's bytes with metadata as its comment; raises ValueError."""
    header, members = split(data)
    comment = json.dumps(filled(metadata, members.values()), separators=(",", ":")).encode()
    if len(comment) > 0xFFFF:
        raise ValueError(f"{len(comment)} bytes of metadata are more than an archive takes")
    old = len(comment_of(data, len(data))) + 2  # with its length, of two bytes
    before = header[: len(header) - old]
    end = sealed(before + struct.pack("<H", len(comment)) + comment)[len(before) :]
    return b"".join((memoryview(data)[: len(data) - old], end))


def load(file: str | os.PathLike[str] | BinaryIO) -> dict[str, NDArray[Any]]:
    """Return the arrays of an archive, as numpy reads them; it raises many kinds of errors."""
    import numpy as np

    with _READING, np.load(file, allow_pickle=False) as arrays:
        return dict(arrays)


def read_metadata(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the metadata of an archive by one read as a rule, and check that it is complete.

    Empty where its comment is none of ours.

    Raises:
        ValueError: it is cut short, has grown, or is no archive.
        OSError: it cannot be read.
    """
    file, size = open_regular(path)
    with file:
        for most in _TAILS:
            file.seek(max(0, size - most))
            if _SIGNATURE in (tail := file.readall()):
                break
    return metadata_of(comment_of(tail, size))


def comment_of(tail: bytes, size: int) -> bytes:
    """Return the comment of an archive, by its last bytes and its size; raises ValueError."""
    place = tail.rfind(_SIGNATURE)
    if place < 0 or len(tail) < place + _END.size:
        raise ValueError("is cut short or no npz file")
    *_, length, offset, comment = _END.unpack_from(tail, place)
    begins = offset + length == size - len(tail) + place
    if not begins or place + _END.size + comment != len(tail):
        raise ValueError("is cut short or has grown")
    return tail[place + _END.size :]


def metadata_of(comment: bytes) -> dict[str, Any]:
    """Return the metadata in an archive's comment; empty where it is none of ours."""
    try:
        found = json.loads(comment)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def split(data: bytes) -> tuple[bytes, dict[str, bytes]]:
    """Split an archive into its header and its members; raises ValueError.

    Returns:
        All bytes but the members', of which the comment is the end; name of each member, in the
        archive's order -> its bytes, uncompressed.
    """
    header, members, done = [], dict[str, bytes](), 0
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            for entry in archive.infolist():
                members[entry.filename] = archive.read(entry)
                place = entry.header_offset
                start = place + _MEMBER.size + sum(_MEMBER.unpack_from(data, place))
                header.append(data[done:start])
                done = start + entry.compress_size
    except Exception as error:  # zipfile and zlib raise many things for a damaged file
        is_changed = "CRC-32" in str(error)
        what = "checksum differs" if is_changed else "is damaged or no npz file"
        raise ValueError(what) from None
    return b"".join((*header, data[done:])), members


def parse_array(member: bytes) -> tuple[str, tuple[int, ...], int]:
    """Return an array's dtype as safetensors names it, its shape, and the offset of its numbers.

    By hand: numpy reads the header by Python's ast, which fails now and then in several threads.

    Raises:
        ValueError: numpy writes no such header.
    """
    found = _ARRAY.match(member)
    if found is None:
        raise ValueError("has a damaged header")
    shape = tuple(map(int, re.findall(rb"\d+", found[2])))
    return _NAMES.get(found[1], found[1].decode("latin-1")), shape, found.end()


def arrays_of(path: str | os.PathLike[str]) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Yield name, dtype and shape of each array, see `parse_array`; raises ValueError, OSError."""
    try:
        with zipfile.ZipFile(path) as archive:
            for name in archive.namelist():
                with archive.open(name) as member:
                    dtype, shape, _ = parse_array(member.read(_HEADER_OF_ARRAY))
                    yield name.removesuffix(".npy"), dtype, shape
    except (zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(f"no npz file: {error}") from None
