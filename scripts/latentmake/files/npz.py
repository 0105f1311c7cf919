"""npz files with their origin in the archive's comment, for trainers that read numpy's archives.

An npz is a ZIP archive of arrays, uncompressed. Its origin is JSON in the archive's comment: numpy
ignores it, and a program that writes the file again leaves it out, so that such a file is no longer
ours. The comment stands at the very end, where one small read finds it and tells whether the file
is complete; zipfile itself would read the directory too.
Formats: https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html, and sections 4.3.14
to 4.3.16 of https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from latentmake.files import checksums
from latentmake.regular import open_regular

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAGIC = b"PK\x03\x04"  # the first bytes of an archive that is not empty
_END = struct.Struct("<4s4H2LH")  # of an archive: signature, disks, entries, size, offset, comment
_LARGE_END = struct.Struct("<4sQ2H2L4Q")  # the same, beyond 32 bits
# Of a member, in the directory: signature, versions, flags, method, time, date, CRC, compressed and
# full size, lengths of name, more and comment, disk, attributes, offset; and before its bytes.
_ENTRY = struct.Struct("<4s6H3L5H2L")
_DIRECTORY = b"PK\x01\x02"
_LOCAL = struct.Struct("<4s22x2H")
_LOCATOR = 20  # bytes between the two
_USUAL = 4096  # bytes that hold a comment of ours
_MOST = _END.size + 0xFFFF
_EPOCH = (1980, 1, 1, 0, 0, 0)  # the earliest that a ZIP archive can say


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


def read_comment(path: str | os.PathLike[str]) -> bytes:
    """Return an archive's comment by one read as a rule, and check that the file is complete.

    Raises:
        ValueError: it is cut short, has grown, is no archive, or no regular file at all.
        OSError: it cannot be read.
    """
    file, size = open_regular(path)
    with file:
        for wanted in (_USUAL, _MOST):
            tail = os.pread(file.fileno(), wanted, max(0, size - wanted))
            place = tail.rfind(b"PK\x05\x06")
            if place >= 0 or size <= wanted:
                break
        if place < 0 or len(tail) < place + _END.size:
            raise ValueError("is cut short or no npz file")
        *_, length, offset, comment = _END.unpack_from(tail, place)
        end = size - len(tail) + place
        if offset == 0xFFFFFFFF:
            end -= _LOCATOR + _LARGE_END.size
            record = os.pread(file.fileno(), _LARGE_END.size, max(0, end))
            if len(record) < _LARGE_END.size or not record.startswith(b"PK\x06\x06"):
                raise ValueError("is cut short or no npz file")
            *_, length, offset = _LARGE_END.unpack(record)
    if place + _END.size + comment != len(tail) or offset + length != end:
        raise ValueError("is cut short or has grown")
    return tail[place + _END.size :]


def arrays_of(path: str | os.PathLike[str]) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Yield name, dtype (as numpy writes it, such as `<f4`) and shape of each array, by headers.

    Raises:
        ValueError: the file is no npz file.
        OSError: it cannot be read.
    """
    from numpy.lib import format as npy

    try:
        with zipfile.ZipFile(path) as archive:
            for name in archive.namelist():
                with archive.open(name) as member:
                    old = npy.read_magic(member) == (1, 0)
                    read = npy.read_array_header_1_0 if old else npy.read_array_header_2_0
                    shape, _, dtype = read(member)
                    yield name.removesuffix(".npy"), dtype.str, shape
    except (zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(f"no npz file: {error}") from None


def comment_of(data: bytes | memoryview) -> bytes:
    """Return the comment of an archive's bytes.

    Raises:
        ValueError: it is cut short, has grown, or is no archive.
    """
    return bytes(data[_comment_start(data) :])


def stamped(data: bytes, metadata: Mapping[str, str]) -> bytes:
    """Return an archive's bytes with metadata as its comment.

    Raises:
        ValueError: it is no archive, damaged, or the metadata take more than 64 KB as JSON.
    """
    archive, start = archive_of(data), _comment_start(data)
    filled = checksums.filled(metadata, map(archive.member, archive.spans))
    comment = json.dumps(filled, separators=(",", ":")).encode()
    if len(comment) > 0xFFFF:
        raise ValueError(f"{len(comment)} bytes of metadata are more than an archive takes")
    length = struct.pack("<H", len(comment))
    before = archive.rest[: len(archive.rest) - (len(data) - start) - len(length)]
    end = checksums.sealed(before + length + comment)[len(before) :]
    return b"".join((memoryview(data)[: start - len(length)], end))


Read = Callable[[int, int], "bytes | memoryview"]
"""Function that returns the bytes from an offset, of a length or fewer."""


class Span(NamedTuple):
    """Place of a member's bytes in an archive."""

    start: int
    end: int
    deflated: bool


class Archive:
    """Directory of an archive, read by hand.

    zipfile would take longer than all else that is done with a small archive.

    Args:
        read: of its bytes.
        size: of the archive in bytes.

    Attributes:
        spans: place of each member by name, in the archive's order.
        rest: all bytes but the members', of which the comment is the end.

    Raises:
        ValueError: it is no archive, damaged, or larger than 4 GB.
    """

    def __init__(self, read: Read, size: int) -> None:
        self._read = read
        self.spans: dict[str, Span] = {}
        rest, done = [], 0
        for usual in (_USUAL, _MOST):
            before = max(0, size - usual)
            tail = read(before, size - before)
            with contextlib.suppress(ValueError):
                end = _comment_start(tail) - _END.size
                break
        else:
            raise ValueError("is cut short or no npz file")
        *_, count, length, place, _ = _END.unpack_from(tail, end)
        entries = tail[place - before :] if place >= before else read(place, length)
        place = 0
        try:
            for _ in range(count):
                entry = _ENTRY.unpack_from(entries, place)
                method, packed, name, offset = entry[4], entry[8], entry[10], entry[-1]
                title = bytes(entries[place + _ENTRY.size : place + _ENTRY.size + name]).decode()
                place += _ENTRY.size + sum(entry[10:13])
                magic, *lengths = _LOCAL.unpack(read(offset, _LOCAL.size))
                start = offset + _LOCAL.size + sum(lengths)
                known = entry[0] == _DIRECTORY and method in (0, zipfile.ZIP_DEFLATED)
                if not known or magic != MAGIC or start < done or start + packed > size:
                    raise ValueError("is damaged")
                self.spans[title] = Span(start, start + packed, bool(method))
                rest.append(bytes(read(done, start - done)))
                done = start + packed
        except struct.error:
            raise ValueError("is damaged") from None
        self.rest = b"".join((*rest, read(done, size - done)))

    def member(self, name: str) -> bytes | memoryview:
        """Return the uncompressed bytes of a member; ValueError if they are damaged."""
        start, end, deflated = self.spans[name]
        data = self._read(start, end - start)
        try:
            return zlib.decompress(data, -15) if deflated else data
        except zlib.error:
            raise ValueError("is damaged") from None


def archive_of(data: bytes) -> Archive:
    """Return the archive in bytes; ValueError as `Archive` says."""
    view = memoryview(data)
    return Archive(lambda start, length: view[start : start + length], len(view))


def _comment_start(data: bytes | memoryview) -> int:
    for wanted in (_USUAL, _MOST):
        before = max(0, len(data) - wanted)
        place = bytes(data[before:]).rfind(b"PK\x05\x06")
        if place >= 0:
            break
    start = before + place + _END.size
    if place < 0 or len(data) < start:
        raise ValueError("is cut short or no npz file")
    *_, comment = _END.unpack_from(data, start - _END.size)
    if start + comment != len(data):
        raise ValueError("is cut short or has grown")
    return start
