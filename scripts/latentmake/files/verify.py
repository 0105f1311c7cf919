"""Check of one cache file: whether its bytes are those that were written."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from latentmake.files import npz
from latentmake.files.cachefile import FOREIGN, KEY, Header, parse_header, recipe_of
from latentmake.files.safetensors import Head, parse_head
from latentmake.files.tensor_bytes import (
    CHECKSUM,
    DTYPES,
    HEADER_CHECKSUM,
    checksum,
    is_sealed,
    largest,
)
from latentmake.regular import open_regular

_SIDE = re.compile("mask|original_size|crop_ltrb|txt_ids")  # tensors that may be zero
_Bytes = bytes | memoryview


class Checked(NamedTuple):
    """Result of a check.

    Attributes:
        damage: what is wrong with the file; None where it is sound.
        is_foreign: whether another program wrote it.
        header: its origin; None where it cannot be read.
        recipe: in its header; empty where there is none.
    """

    damage: str | None
    is_foreign: bool = False
    header: Header | None = None
    recipe: Mapping[str, object] = MappingProxyType({})

    @property
    def has_checksum(self) -> bool:
        """Whether its header has a checksum; a file of an older release has none."""
        return self.header is not None and self.header.checksum != ""


def verify(path: str | os.PathLike[str], *, values: bool = True) -> Checked:
    """Read a cache file and check it; several threads may do so at a time.

    `values` tells whether NaN, infinity and tensors of zeros are looked for. An embedding may be
    zeros, as that of an empty caption.

    Raises:
        OSError: it is gone or cannot be read.
    """
    try:
        file, _ = open_regular(path)
    except ValueError as error:
        return Checked(f"{FOREIGN} ({error})", is_foreign=True)
    with file:
        data = file.readall()
    is_npz, origin, metadata = data.startswith(npz.MAGIC), None, dict[str, Any]()
    try:
        head = None if is_npz else parse_head(data)
        metadata = head.metadata if head else npz.metadata_of(npz.comment_of(data))
        origin = parse_header(metadata, head.data if head else b"")
        header, arrays, pieces = _safetensors(data, head) if head else _npz(data)
    except ValueError as error:
        # The end of an npz file may be gone, which has the key; a crash may leave zeros of any.
        is_lost = str(error) != FOREIGN and (is_npz or not data.strip(b"\0"))
        if is_lost or KEY.encode() in data:
            return Checked(str(error), header=origin, recipe=recipe_of(metadata))
        return Checked(FOREIGN, is_foreign=True)
    damage, recipe = None, recipe_of(metadata)
    if not metadata.keys().isdisjoint((CHECKSUM, HEADER_CHECKSUM)):  # else of an older release
        if not is_sealed(header, metadata.get(HEADER_CHECKSUM)):
            damage = "has a damaged header"
        elif origin.checksum != checksum(pieces):
            damage = "checksum differs"
    if damage is None and values:
        damage = _values_fault(arrays, may_be_zero=recipe.get("kind") == "text")
    return Checked(damage, header=origin, recipe=recipe)


def corruption_of(path: str | os.PathLike[str]) -> str | None:
    """Return the damage of a file that its own checksums tell.

    None for a sound file, and for one without checksums, which whoever reads it will judge.

    Raises:
        OSError: it is gone or cannot be read.
    """
    checked = verify(path, values=False)
    return checked.damage if checked.has_checksum else None


_Parsed = tuple[bytes, dict[str, tuple[str, _Bytes]], list[_Bytes]]
"""Bytes of the header's checksum; name of each tensor -> dtype and bytes; bytes of the checksum of
the tensors."""


def _safetensors(data: bytes, head: Head) -> _Parsed:
    body = memoryview(data)[len(head.data) :]
    arrays: dict[str, tuple[str, _Bytes]] = {}
    for name, (dtype, shape, start, end) in head.tensors.items():
        size = math.prod(shape) * DTYPES[dtype].size if dtype in DTYPES else end - start
        if not 0 <= start <= end or size != end - start:
            raise ValueError("has a damaged header")
        arrays[name] = dtype, body[start:end]
    return head.data[8:], arrays, [body]


def _npz(data: bytes) -> _Parsed:
    header, members = npz.split(data)
    arrays: dict[str, tuple[str, _Bytes]] = {}
    for name, member in members.items():
        dtype, _, start = npz.parse_array(member)
        arrays[name.removesuffix(".npy")] = dtype, memoryview(member)[start:]
    return header, arrays, [*members.values()]


def _values_fault(arrays: dict[str, tuple[str, _Bytes]], *, may_be_zero: bool) -> str | None:
    longest = max((len(data) for _, data in arrays.values()), default=0)
    for name, (dtype, data) in arrays.items():
        top = largest(dtype, data)
        if top is None:
            return f"holds NaN or infinity ({name})"
        # Masks, positions and small tensors may be zero.
        if not (top or may_be_zero or 2 * len(data) < longest or _SIDE.search(name)):
            return f"is all zeros ({name})"
    return None
