"""npz files for trainers that read numpy's archives. The archive's comment records the origin.

An npz is an uncompressed ZIP archive of arrays. The origin is JSON in the archive's comment. numpy
ignores the comment, and a program that writes the file again drops it, so that the file no longer
counts as ours. The comment is at the end of the file. One small read gets it and shows whether the
file is complete; zipfile would read the directory, too.
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
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, BinaryIO

from latentmake.base.errors import first_line
from latentmake.base.regular import open_regular
from latentmake.formats.safetensors import filled, sealed

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAGIC = b"PK\x03\x04"  # first bytes of an archive that is not empty
_SIGNATURE = b"PK\x05\x06"
# End record: signature, disks, entries, size and offset of the directory, length of the comment.
_END = struct.Struct("<4s4H2LH")
# Header before a member: lengths of its name and of its extra field, which follow the header.
_MEMBER = struct.Struct("<26x2H")
_TAILS = 4096, _END.size + 0xFFFF  # bytes to read for a usual comment, and for the longest one
_EPOCH = (1980, 1, 1, 0, 0, 0)  # earliest time of a ZIP archive; a fixed time gives equal bytes
_ARRAY = re.compile(
    rb"\x93NUMPY(?:\x01.{3}|[\x02\x03].{5})\{'descr': '([^']+)', 'fortran_order': (?:True|False), "
    rb"'shape': \(([\d, ]*)\), \} *\n",
    re.DOTALL,
)
_HEADER_OF_ARRAY = 256  # bytes, more than the header of an array takes
# numpy parses headers with Python's ast module, which fails now and then in several threads.
_READING = threading.Lock()
# numpy's name of a dtype -> safetensors' name
_NAMES = {b"<i8": "I64", b"<f8": "F64", b"<f4": "F32", b"<i4": "I32", b"<f2": "F16", b"|b1": "BOOL"}


def serialize(arrays: Mapping[str, NDArray[Any]], metadata: Mapping[str, str]) -> bytes:
    """Return the bytes of an npz file. The same arrays and metadata give the same bytes.

    Raises:
        ValueError: the metadata are longer than 64 KB as JSON.
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
    """Return an archive's bytes with metadata as its comment.

    Raises:
        ValueError: the archive is damaged, or the metadata are longer than 64 KB as JSON.
    """
    header, members = split(data)
    comment = json.dumps(filled(metadata, members.values()), separators=(",", ":")).encode()
    if len(comment) > 0xFFFF:
        raise ValueError(f"{len(comment)} bytes of metadata are more than an archive takes")
    old = len(comment_of(data, len(data))) + 2  # 2 bytes before the comment are its length
    before = header[: len(header) - old]
    end = sealed(before + struct.pack("<H", len(comment)) + comment)[len(before) :]
    return b"".join((memoryview(data)[: len(data) - old], end))


def load(file: str | os.PathLike[str] | BinaryIO) -> dict[str, NDArray[Any]]:
    """Return the arrays of an archive; raises ValueError, OSError."""
    import numpy as np

    with _naming_damage(), _READING, np.load(file, allow_pickle=False) as arrays:
        return dict(arrays)


@contextmanager
def _naming_damage() -> Iterator[None]:
    """Turn the errors of numpy, zipfile and zlib, which are of many types, into a ValueError."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise ValueError(f"is cut short or no npz file ({first_line(error)})") from None


def read_metadata(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the metadata of an archive, usually by one read, and check that it is complete.

    They are empty if Latentmake did not write the comment.

    Raises:
        ValueError: the file is cut short, has grown, or is no archive.
        OSError: the file cannot be read.
    """
    file, size = open_regular(path)
    with file:
        for most in _TAILS:
            file.seek(max(0, size - most))
            if _SIGNATURE in (tail := file.readall()):
                break
    return metadata_of(comment_of(tail, size))


def comment_of(tail: bytes, size: int) -> bytes:
    """Return the comment of an archive from its last bytes and its size; raises ValueError."""
    place = tail.rfind(_SIGNATURE)
    if place < 0 or len(tail) < place + _END.size:
        raise ValueError("is cut short or no npz file")
    *_, length, offset, comment = _END.unpack_from(tail, place)
    begins = offset + length == size - len(tail) + place
    if not begins or place + _END.size + comment != len(tail):
        raise ValueError("is cut short or has grown")
    return tail[place + _END.size :]


def metadata_of(comment: bytes) -> dict[str, Any]:
    """Return the metadata in an archive's comment; empty if the comment is no JSON object."""
    try:
        metadata = json.loads(comment)
    except (ValueError, RecursionError):
        return {}
    return metadata if isinstance(metadata, dict) else {}


def split(data: bytes) -> tuple[bytes, dict[str, bytes]]:
    """Split an archive into its header and its members; raises ValueError.

    Returns:
        All bytes except those of the members; they end with the comment. Name of a member -> its
        bytes, uncompressed, in the archive's order.
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
    except Exception as error:  # zipfile and zlib raise many types of errors for a damaged file
        is_changed = "CRC-32" in str(error)
        what = "checksum differs" if is_changed else "is damaged or no npz file"
        raise ValueError(what) from None
    return b"".join((*header, data[done:])), members


def parse_array(member: bytes) -> tuple[str, tuple[int, ...], int]:
    """Return an array's dtype (safetensors' name), its shape, and the offset of its numbers.

    numpy is not used: it parses the header with Python's ast module, which fails now and then in
    several threads.

    Raises:
        ValueError: the header is not one that numpy writes.
    """
    header = _ARRAY.match(member)
    if header is None:
        raise ValueError("has a damaged header")
    shape = tuple(map(int, re.findall(rb"\d+", header[2])))
    return _NAMES.get(header[1], header[1].decode("latin-1")), shape, header.end()


def shapes_of(path: str | os.PathLike[str]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield name and shape of each array; raises ValueError, OSError."""
    with _naming_damage(), zipfile.ZipFile(path) as archive:
        for name in archive.namelist():
            with archive.open(name) as member:
                yield name.removesuffix(".npy"), parse_array(member.read(_HEADER_OF_ARRAY))[1]
