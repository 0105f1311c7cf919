"""Check of one cache file: whether its bytes are those that were written.

A sound file is read once by `files/intact.py`. Only another one is parsed here, for the reason.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from typing import NamedTuple

from latentmake.errors import CacheError
from latentmake.files import cachefile, checksums, npz
from latentmake.files.intact import DTYPES, NPY, read_intact
from latentmake.files.safetensors import FLOATS, largest, parse_head
from latentmake.regular import open_regular

FOREIGN = "was not made by latentmake"
_HEADER = "has a damaged header"
_STAMP = (cachefile.KEY, cachefile.RECIPE, cachefile.SOURCE)
_SIDE = re.compile("mask|original_size|crop_ltrb|txt_ids")  # tensors that may be zero


class Checked(NamedTuple):
    """Result of a check.

    Attributes:
        damage: what is wrong with the file; None where it is sound.
        has_checksum: whether its header has one; a file of an older release has none.
        is_foreign: whether another program wrote it.
    """

    damage: str | None
    has_checksum: bool = False
    is_foreign: bool = False


class _Content(NamedTuple):
    """A parsed file.

    Attributes:
        header: the bytes that its own checksum is of.
        arrays: dtype (as safetensors names it) and bytes of each tensor.
        pieces: the bytes that the checksum of the tensors is of.
    """

    header: bytes
    metadata: Mapping[str, object]
    arrays: Mapping[str, tuple[str, bytes | memoryview]]
    pieces: list[bytes | memoryview]


def verify(path: str | os.PathLike[str], *, may_be_zero: bool = False) -> Checked:
    """Read a cache file and check it; several threads may do so at a time.

    Args:
        path: of the file.
        may_be_zero: whether a sound file may hold zeros alone, as that of an empty caption.

    Raises:
        OSError: it is gone or cannot be read.
    """
    if read_intact(path, values=True) is not None:
        return Checked(None, has_checksum=True)
    return _examined(path, values=True, may_be_zero=may_be_zero)


def corruption_of(path: str | os.PathLike[str]) -> str | None:
    """Return the damage of a file that its own checksums tell.

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
    return _examined(path).damage if header.checksum else None


def _examined(
    path: str | os.PathLike[str], *, values: bool = False, may_be_zero: bool = False
) -> Checked:
    """Parse a file for what is wrong with it; NaN and zeros count where `values` are looked at."""
    try:
        file, _ = open_regular(path)
    except ValueError as error:
        return Checked(f"{FOREIGN} ({error})", is_foreign=True)
    with file:
        data = file.readall()
    is_npz, foreign = data.startswith(npz.MAGIC), cachefile.KEY.encode() not in data
    try:
        content = _npz(data) if is_npz else _safetensors(data)
    except (ValueError, AttributeError, RecursionError) as error:
        what = str(error) if type(error) is ValueError else _HEADER  # others are JSON's
        # The end of an npz file may be gone, which has the key; a crash may leave zeros of any.
        foreign = foreign and not is_npz and bool(data.strip(b"\0"))
        return Checked(FOREIGN if foreign else what, is_foreign=foreign)
    damage = _header_fault(content.metadata, content.header)
    wanted = content.metadata.get(cachefile.CHECKSUM)
    if damage is None and wanted not in (None, checksums.of_tensors(content.pieces)):
        damage = "checksum differs"
    if damage is None and values:
        damage = _values_fault(content.arrays, may_be_zero=may_be_zero)
    return Checked(damage, wanted is not None, foreign)


def _safetensors(data: bytes) -> _Content:
    head = parse_head(data)
    if cachefile.KEY in head.metadata and not cachefile.is_as_written(head.data, head.metadata):
        raise ValueError("was rewritten by another program")
    body = memoryview(data)[len(head.data) :]
    arrays: dict[str, tuple[str, bytes | memoryview]] = {}
    for name, (dtype, shape, start, end) in head.tensors.items():
        size = math.prod(shape) * cachefile.BYTES.get(dtype, 0)
        if not 0 <= start <= end or size not in (0, end - start):
            raise ValueError(_HEADER)
        arrays[name] = dtype, body[start:end]
    return _Content(head.data[8:], head.metadata, arrays, [body])


def _npz(data: bytes) -> _Content:
    comment = npz.comment_of(data)
    metadata: dict[str, object] = {}
    metadata |= json.loads(comment).items() if comment else {}
    archive = npz.archive_of(data)
    members = {name: archive.member(name) for name in archive.spans}
    arrays = {}
    for name, member in members.items():
        # By hand: numpy reads headers by Python's ast, which fails now and then in several threads.
        found = NPY.match(member)
        if found is None:
            raise ValueError(_HEADER)
        arrays[name.removesuffix(".npy")] = DTYPES.get(found[1].decode(), ""), member[found.end() :]
    return _Content(archive.rest, metadata, arrays, [*members.values()])


def _header_fault(metadata: Mapping[str, object], header: bytes) -> str | None:
    if not all(isinstance(metadata.get(name), str) for name in _STAMP):
        return _HEADER if cachefile.KEY in metadata else FOREIGN
    if not metadata.keys() & checksums.PLACEHOLDERS.keys():
        return None  # of an older release
    found = checksums.STAMPED.search(header)
    return None if found and checksums.header_is_intact(header, found) else _HEADER


def _values_fault(
    arrays: Mapping[str, tuple[str, bytes | memoryview]], *, may_be_zero: bool
) -> str | None:
    longest = max((len(data) for _, data in arrays.values()), default=0)
    for name, (dtype, data) in arrays.items():
        top = largest(data, *FLOATS[dtype]) if dtype in FLOATS else 1
        if top is None:
            return f"holds NaN or infinity ({name})"
        # Masks, positions and small tensors may be zero.
        if not (top or may_be_zero or 2 * len(data) < longest or _SIDE.search(name)):
            return f"is all zeros ({name})"
    return None
