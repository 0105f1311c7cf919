"""Check of one cache file: whether its bytes are those that were written for its target.

A sound file with checksums is read once, in pieces that stay in the processor's cache, and its
header is compared as bytes. Only another one is parsed and searched for a reason.
"""

from __future__ import annotations

import json
import math
import os
import re
import struct
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from latentmake import digest
from latentmake.errors import CacheError
from latentmake.files import cachefile, checksums, npz
from latentmake.files.regular import open_regular
from latentmake.files.safetensors import holds_numbers, parse_head

if TYPE_CHECKING:
    import xxhash

__all__ = ["REASONS", "Checked", "Expected", "corruption_of", "damage_of", "verify"]

CUT_SHORT = "cut short"
LONGER = "longer than its header says"
HEADER = "header damaged"
FOREIGN = "not made by latentmake"
OTHER_ITEM = "of another item"
OTHER_RECIPE = "of another recipe"
SHAPE = "of another shape or dtype"
ZEROS = "all zeros"
CONSTANT = "constant"
NOT_FINITE = "NaN or infinity"
CHECKSUM = "checksum differs"
REASONS = (
    *(CUT_SHORT, LONGER, HEADER, FOREIGN, OTHER_ITEM, OTHER_RECIPE, SHAPE),
    *(ZEROS, CONSTANT, NOT_FINITE, CHECKSUM),
)
"""Kinds of damage; further words follow one in parentheses."""

_PIECE = 1 << 18  # bytes that are read and hashed at a time
_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK  # so that a pipe is no endless wait
_NPY = re.compile(
    rb"\{'descr': '([^']+)', 'fortran_order': (?:True|False), 'shape': \(([\d, ]*)\), \} *\n"
)
_DTYPES = {"<f2": "F16", "<f4": "F32", "<f8": "F64", "<i4": "I32", "<i8": "I64", "|b1": "BOOL"}
_FLOATS = {"BF16": "<u2", "F16": "<u2", "F32": "<u4", "F64": "<u8"}
_SIDE = re.compile("mask|original_size|crop_ltrb|txt_ids")  # constant or zero by right
_own = threading.local()


class Expected(NamedTuple):
    """What a file is to hold.

    Attributes:
        key: of its target.
        recipe: digest of its recipe; "" where that is not known.
        tensors: dtype (as safetensors names it) and shape by name, as far as known.
        owners: key -> name of the item that it belongs to, for a file of another one.
        may_be_zero: whether it may hold zeros alone, as the embedding of an empty caption.
    """

    key: str
    recipe: str = ""
    tensors: Mapping[str, tuple[str, Sequence[int]]] = {}
    owners: Mapping[str, str] = {}
    may_be_zero: bool = False


class Checked(NamedTuple):
    """What was found of a file.

    Attributes:
        damage: one of `REASONS`, maybe with more in parentheses; None where it is sound.
        size: bytes of the file.
        has_checksum: whether its header has one; a file of an older release has none.
        key: the one in its header, where that is sound.
    """

    damage: str | None
    size: int
    has_checksum: bool
    key: str | None


def damage_of(path: str | os.PathLike[str], expected: Expected) -> str | None:
    """Return what is wrong with a cache file, None where it is sound; see `verify`."""
    return verify(path, expected).damage


def verify(path: str | os.PathLike[str], expected: Expected) -> Checked:
    """Read a cache file and check it; several threads may do so at a time.

    A file with the checksums that it was written with is not searched for NaN or zeros: no such
    file is written.

    Raises:
        OSError: it is gone or cannot be read.
    """
    size = _read_intact(path, expected.key)
    if size is not None:
        return Checked(None, size, True, expected.key)
    try:
        file, _ = open_regular(path)
    except ValueError as error:
        return Checked(f"{FOREIGN} ({error})", 0, False, None)
    with file:
        data = file.readall()
    is_npz = os.fspath(path).endswith(".npz") or data.startswith(npz.MAGIC)
    return _File(data, expected).check(is_npz)


def corruption_of(path: str | os.PathLike[str]) -> str | None:
    """Return the damage of a file that its own checksums tell, whatever target it is of.

    None for a sound file, and for one without checksums.

    Raises:
        OSError: it is gone or cannot be read.
    """
    if _read_intact(path, None) is not None:
        return None
    try:
        header = cachefile.read_header(path)
    except CacheError:
        return None  # not ours; whoever reads it says what is wrong
    return damage_of(path, Expected(header.key)) if header.checksum else None


# -- a sound file ---------------------------------------------------------------------------------


def _read_intact(path: str | os.PathLike[str], key: str | None) -> int | None:
    """Return the size of a file that has a key, if given, and its checksums; else None."""
    import xxhash

    buffer: memoryview | None = getattr(_own, "buffer", None)
    if buffer is None:
        buffer = _own.buffer = memoryview(bytearray(_PIECE))
    file = os.open(path, _FLAGS)
    try:
        size = os.fstat(file).st_size
        try:
            got = os.readv(file, [buffer])
        except (IsADirectoryError, BlockingIOError):
            return None
        if buffer[: len(npz.MAGIC)] == npz.MAGIC:
            return size if _npz_is_intact(file, size, got, buffer, key) else None
        length = 8 + struct.unpack_from("<Q", buffer)[0]
        found = _stamp_of(bytes(buffer[8:length]), key) if length <= got else None
        if found is None:
            return None
        tensors = xxhash.xxh3_128(buffer[length:got])
        read = _update(tensors, file, got, size, buffer)
        return size if read and tensors.hexdigest().encode() == found[1][-32:] else None
    finally:
        os.close(file)


def _npz_is_intact(file: int, size: int, got: int, buffer: memoryview, key: str | None) -> bool:
    """Likewise of an archive, whose first bytes are in the buffer."""
    import xxhash

    def read(start: int, length: int) -> bytes | memoryview:
        if start + length <= got:
            return buffer[start : start + length]
        return os.pread(file, length, start)

    try:
        archive = npz.Archive(read, size)
    except ValueError:
        return False
    found, spans = _stamp_of(archive.rest, key), archive.spans.values()
    if found is None or any(deflated for _, _, deflated in spans):
        return False
    tensors = xxhash.xxh3_128()
    for start, end, _ in spans:
        done = max(start, min(end, got))
        tensors.update(buffer[start:done])
        if done < end:
            got = 0  # the buffer has other bytes from here on
            if not _update(tensors, file, done, end, buffer):
                return False
    return tensors.hexdigest().encode() == found[1][-32:]


def _update(tensors: xxhash.xxh3_128, file: int, done: int, end: int, buffer: memoryview) -> bool:
    """Add a part of a file to a checksum; return whether it is there to its end."""
    while done < end:
        got = os.preadv(file, [buffer[: end - done]], done)
        if not got:
            return False
        tensors.update(buffer[:got])
        done += got
    return True


def _stamp_of(head: bytes, key: str | None) -> re.Match[bytes] | None:
    found = checksums.STAMPED.search(head)
    if found is None or (key is not None and found[3] != key.encode()):
        return None
    return found if checksums.header_is_intact(head, found) else None


# -- reasons --------------------------------------------------------------------------------------


class _DamageError(Exception):
    """What is wrong with a file."""


class _Array(NamedTuple):
    """A tensor and its bytes; dtype as safetensors names it."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes | memoryview


class _File:
    """A file that is not known to be sound, whose content is examined."""

    def __init__(self, data: bytes, expected: Expected) -> None:
        self.data = data
        self.expected = expected
        self.metadata: Mapping[str, object] = {}
        self.arrays: dict[str, _Array] = {}
        self.pieces: list[bytes | memoryview] = []

    def check(self, is_npz: bool) -> Checked:
        damage = key = None
        try:
            if not self.data:
                raise _DamageError(f"{CUT_SHORT} (it is empty)")
            if not self.data.strip(b"\0"):
                raise _DamageError(f"{ZEROS} (its header too)")
            header = self._npz() if is_npz else self._safetensors()
            found = checksums.STAMPED.search(header)
            promised = self.metadata.keys() & checksums.PLACEHOLDERS.keys()
            if promised and (found is None or not checksums.header_is_intact(header, found)):
                raise _DamageError(HEADER)
            key = self._check_stamp()
            self._check_shapes()
            self._check_values()
        except _DamageError as error:
            damage = str(error)
        return Checked(damage, len(self.data), cachefile.CHECKSUM in self.metadata, key)

    # -- formats ----------------------------------------------------------------------------------

    def _safetensors(self) -> bytes:
        """Parse a safetensors file; return its header's JSON."""
        data = self.data
        (length,) = struct.unpack_from("<Q", data.ljust(8, b"\0"))
        try:
            head = parse_head(data)
            tensors = head.tensors
        except ValueError:
            raise _DamageError(_fault_of(data, length)) from None
        self.metadata = head.metadata
        if cachefile.KEY in head.metadata and not cachefile.is_as_written(head.data, head.metadata):
            raise _DamageError(f"{HEADER} (rewritten by another program)")
        self.pieces = [memoryview(data)[len(head.data) :]]
        for name, (dtype, shape, start, end) in tensors.items():
            bits = math.prod(shape) * cachefile.BYTES.get(dtype, 0)
            if not 0 <= start <= end or bits not in (0, end - start):
                raise _DamageError(HEADER)
            self.arrays[name] = _Array(dtype, shape, self.pieces[0][start:end])
        return head.data[8:]

    def _npz(self) -> bytes:
        """Parse an npz file; return all but its arrays."""
        try:
            comment = npz.comment_of(self.data)
        except ValueError:
            foreign = not self.data.startswith(npz.MAGIC)
            raise _DamageError(FOREIGN if foreign else CUT_SHORT) from None
        try:
            metadata = json.loads(comment) if comment else {}
            metadata.keys()  # an object
            archive = npz.archive_of(self.data)
            for name in archive.spans:
                self.pieces.append(member := archive.member(name))
                self.arrays[name.removesuffix(".npy")] = _array_of(member)
        except (ValueError, AttributeError, RecursionError):
            ours = cachefile.KEY.encode() in comment
            raise _DamageError(HEADER if ours else FOREIGN) from None
        self.metadata = metadata
        return archive.rest

    # -- checks -----------------------------------------------------------------------------------

    def _check_stamp(self) -> str:
        """Compare key and recipe; return the key."""
        names = (cachefile.KEY, cachefile.RECIPE, cachefile.SOURCE)
        key, recipe, source = (self.metadata.get(name) for name in names)
        if not (isinstance(key, str) and isinstance(recipe, str) and isinstance(source, str)):
            raise _DamageError(HEADER if key is not None else FOREIGN)
        expected = self.expected
        if key != expected.key:
            if expected.recipe not in ("", digest.of_bytes(recipe.encode(errors="replace"))):
                raise _DamageError(OTHER_RECIPE)
            owner = expected.owners.get(key)
            raise _DamageError(OTHER_ITEM + (f" ({owner})" if owner else ""))
        if expected.recipe not in ("", digest.of_bytes(recipe.encode(errors="replace"))):
            raise _DamageError(HEADER)  # a key is of one recipe
        return key

    def _check_shapes(self) -> None:
        for name, (dtype, shape) in self.expected.tensors.items():
            found = self.arrays.get(name)
            if found is None:
                raise _DamageError(f"{SHAPE} (has no {name})")
            if (found.dtype, found.shape) != (dtype, tuple(shape)):
                what = f"{name} is {found.dtype} {list(found.shape)}, not {dtype} {list(shape)}"
                raise _DamageError(f"{SHAPE} ({what})")

    def _check_values(self) -> None:
        """Compare the checksum; without an equal one look at the values."""
        wanted = self.metadata.get(cachefile.CHECKSUM)
        if wanted is not None and wanted == checksums.of_tensors(self.pieces):
            return
        longest = max((len(each.data) for each in self.arrays.values()), default=0)
        for name, array in self.arrays.items():
            if array.dtype not in _FLOATS:
                continue
            if not holds_numbers(array.dtype, array.data):
                raise _DamageError(f"{NOT_FINITE} ({name})")
            # Masks, positions and small tensors may be constant by right.
            if 2 * len(array.data) < longest or _SIDE.search(name) or self.expected.may_be_zero:
                continue
            if same := _sameness(array):
                raise _DamageError(f"{same} ({name})")
        if wanted is not None:
            raise _DamageError(CHECKSUM)


def _fault_of(data: bytes, length: int) -> str:
    """Return what is wrong with a safetensors file whose header cannot be parsed."""
    if 8 + length <= len(data):
        try:
            entries = json.loads(data[8 : 8 + length])
            end = max(each["data_offsets"][1] for name, each in entries.items() if name[:2] != "__")
        except (ValueError, LookupError, AttributeError, TypeError, RecursionError):
            return HEADER
        size = len(data) - 8 - length
        return CUT_SHORT if size < end else LONGER if size > end else HEADER
    if not data.startswith(b"{", 8):
        return CUT_SHORT if len(data) < 9 else FOREIGN
    text = data[8 : 8 + _PIECE].decode("utf-8", "replace")
    try:
        _, end = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):
        return CUT_SHORT
    return HEADER if text[end:].strip(" ") else CUT_SHORT  # its length alone is wrong


def _array_of(member: bytes | memoryview) -> _Array:
    """Return the array in a member of an archive.

    By hand: numpy reads headers by Python's ast, which fails now and then in several threads.

    Raises:
        ValueError: it is no array, or damaged.
    """
    size = 10 if member[6:7] == b"\1" else 12
    found = _NPY.match(member, size)
    if member[:6] != b"\x93NUMPY" or found is None:
        raise ValueError("is no array")
    shape = tuple(int(side) for side in found[2].split(b",") if side.strip())
    return _Array(_DTYPES.get(found[1].decode(), found[1].decode()), shape, member[found.end() :])


def _sameness(array: _Array) -> str | None:
    """Return how all values of a tensor are the same, None where they differ."""
    import numpy as np  # planning imports what is above, and does without

    values = np.frombuffer(array.data, _FLOATS[array.dtype])
    if len(values) == 0 or values[0] != values[-1] or not bool((values == values[0]).all()):
        return None
    if not values[0]:
        return ZEROS
    return CONSTANT if len(values) > 1 else None
