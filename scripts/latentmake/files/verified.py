"""Check of one cache file: whether its bytes are those that were written for its target.

A sound file is read once by `files/intact.py`. Only another one is parsed here, for the reason.
"""

from __future__ import annotations

import json
import math
import os
import re
import struct
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from latentmake import digest
from latentmake.errors import CacheError
from latentmake.files import cachefile, checksums, npz
from latentmake.files.intact import DTYPES, NPY, read_intact
from latentmake.files.safetensors import FLOATS, holds_numbers, parse_head
from latentmake.regular import open_regular

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

_FIRST = 1 << 20  # bytes in which the end of a header is looked for
_SIDE = re.compile("mask|original_size|crop_ltrb|txt_ids")  # constant or zero by right


class Expected(NamedTuple):
    """What a file is to hold.

    Attributes:
        key: of its target.
        recipe: digest of its recipe; "" where that is not known.
        tensors: dtype (as safetensors names it) and shape by name, as far as known.
        owners: key -> name of the item that it belongs to, for a file of another one.
        may_be_zero: whether it may hold zeros alone, as the embedding of an empty caption, unless
            its checksum says that it did not.
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

    Raises:
        OSError: it is gone or cannot be read.
    """
    size = read_intact(path, expected.key, values=True)
    if size is not None:
        return Checked(None, size, True, expected.key)
    return _examine(path, expected)


def _examine(
    path: str | os.PathLike[str], expected: Expected, *, bytes_alone: bool = False
) -> Checked:
    """Parse a file; of one with its checksums the values do not count where `bytes_alone`."""
    try:
        file, _ = open_regular(path)
    except ValueError as error:
        return Checked(f"{FOREIGN} ({error})", 0, False, None)
    with file:
        data = file.readall()
    is_npz = os.fspath(path).endswith(".npz") or data.startswith(npz.MAGIC)
    return _File(data, expected, bytes_alone).check(is_npz)


def corruption_of(path: str | os.PathLike[str]) -> str | None:
    """Return the damage of a file that its own checksums tell, whatever target it is of.

    None for a sound file, and for one without checksums.

    Raises:
        OSError: it is gone or cannot be read.
    """
    if read_intact(path) is not None:
        return None
    try:
        header = cachefile.read_header(path)
    except CacheError:
        return None  # not ours; whoever reads it says what is wrong
    if not header.checksum:
        return None
    return _examine(path, Expected(header.key), bytes_alone=True).damage


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

    def __init__(self, data: bytes, expected: Expected, bytes_alone: bool) -> None:
        self.data = data
        self.expected = expected
        self.bytes_alone = bytes_alone
        self.header_fault: str | None = None
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
                self.header_fault = self.header_fault or HEADER
            if self.header_fault is None:
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
            self.header_fault = f"{HEADER} (rewritten by another program)"
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
        """Look at the values, which say more than a checksum, then compare that."""
        wanted = self.metadata.get(cachefile.CHECKSUM)
        same = wanted is not None and wanted == checksums.of_tensors(self.pieces)
        if same and self.header_fault is not None:
            raise _DamageError(HEADER)  # its entries may tell of another dtype
        if same and self.bytes_alone:
            return
        longest = max((len(each.data) for each in self.arrays.values()), default=0)
        for name, array in self.arrays.items():
            if array.dtype not in FLOATS:
                continue
            if not holds_numbers(array.dtype, array.data):
                raise _DamageError(f"{NOT_FINITE} ({name})")
            # Masks, positions and small tensors may be constant by right.
            by_right = self.expected.may_be_zero and (same or wanted is None)
            if 2 * len(array.data) < longest or _SIDE.search(name) or by_right:
                continue
            if uniform := _uniformity(array):
                raise _DamageError(f"{uniform} ({name})")
        if self.header_fault is not None:
            raise _DamageError(self.header_fault)
        if wanted is not None and not same:
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
    text = data[8 : 8 + _FIRST].decode("utf-8", "replace")
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
    found = NPY.match(member)
    if found is None:
        raise ValueError("is no array")
    shape = tuple(int(side) for side in found[2].split(b",") if side.strip())
    return _Array(DTYPES.get(found[1].decode(), found[1].decode()), shape, member[found.end() :])


def _uniformity(array: _Array) -> str | None:
    """Return how all values of a tensor are the same, None where they differ."""
    import numpy as np  # planning imports what is above, and does without

    values = np.frombuffer(array.data, f"<u{FLOATS[array.dtype][0]}")
    if len(values) == 0 or values[0] != values[-1] or not bool((values == values[0]).all()):
        return None
    if not values[0]:
        return ZEROS
    return CONSTANT if len(values) > 1 else None
