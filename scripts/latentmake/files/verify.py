"""Check of one cache file: whether its bytes are those that were written."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from latentmake.files import npz
from latentmake.files.cachefile import FOREIGN, KEY, Header, parse_header, recipe_of
from latentmake.files.safetensors import (
    CHECKSUM,
    DTYPES,
    HEADER_CHECKSUM,
    checksum,
    is_sealed,
    largest,
    parse_head,
)

_SIDE = re.compile("mask|original_size|crop_ltrb|txt_ids")  # tensors that may be zero
_Bytes = bytes | memoryview


class Checked(NamedTuple):
    """Result of a check.

    Attributes:
        damage: what is wrong with the file; None where it is sound, `FOREIGN` where another program
            wrote it.
        header: its origin; None where it cannot be read.
        recipe: in its header; empty where there is none.
    """

    damage: str | None
    header: Header | None = None
    recipe: Mapping[str, object] = MappingProxyType({})

    @property
    def is_foreign(self) -> bool:
        """Whether another program wrote it."""
        return self.damage == FOREIGN

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
    data = Path(path).read_bytes()
    is_npz, origin, metadata = data.startswith(npz.MAGIC), None, dict[str, Any]()
    pieces: Iterable[_Bytes]
    try:
        if is_npz:
            metadata = npz.metadata_of(npz.comment_of(data, len(data)))
            origin = parse_header(metadata, b"")
            header, members = npz.split(data)
            pieces, arrays = members.values(), dict(map(_array, members.items()))
        else:
            head = parse_head(data)
            metadata, header = head.metadata, head.data[8:]
            origin, body = parse_header(metadata, head.data), memoryview(data)[len(head.data) :]
            pieces, arrays = [body], {}
            for name, (dtype, shape, start, end) in head.tensors.items():
                size = math.prod(shape) * DTYPES[dtype].size if dtype in DTYPES else end - start
                if not 0 <= start <= end or size != end - start:
                    raise ValueError("has a damaged header")
                arrays[name] = dtype, body[start:end]
    except ValueError as error:
        # The end of an npz file may be gone, which has the key; a crash may leave zeros of any.
        is_lost = str(error) != FOREIGN and (is_npz or not data.strip(b"\0"))
        if is_lost or KEY.encode() in data:
            return Checked(str(error), origin, recipe_of(metadata))
        return Checked(FOREIGN)
    damage, recipe = None, recipe_of(metadata)
    if not metadata.keys().isdisjoint((CHECKSUM, HEADER_CHECKSUM)):  # else of an older release
        if not is_sealed(header, metadata.get(HEADER_CHECKSUM)):
            damage = "has a damaged header"
        elif origin.checksum != checksum(pieces):
            damage = "checksum differs"
    if damage is None and values:
        damage = _values_fault(arrays, may_be_zero=recipe.get("kind") == "text")
    return Checked(damage, origin, recipe)


def corruption_of(path: str | os.PathLike[str]) -> str | None:
    """Return the damage of a file that its own checksums tell.

    None for a sound file, and for one without checksums, which whoever reads it will judge.

    Raises:
        OSError: it is gone or cannot be read.
    """
    checked = verify(path, values=False)
    return checked.damage if checked.has_checksum else None


def _array(member: tuple[str, bytes]) -> tuple[str, tuple[str, _Bytes]]:
    """Return the name of an array in an archive, its dtype and the bytes of its numbers."""
    name, data = member
    dtype, _, start = npz.parse_array(data)
    return name.removesuffix(".npy"), (dtype, memoryview(data)[start:])


def _values_fault(arrays: Mapping[str, tuple[str, _Bytes]], *, may_be_zero: bool) -> str | None:
    longest = max((len(data) for _, data in arrays.values()), default=0)
    for name, (dtype, data) in arrays.items():
        top = largest(dtype, data)
        if top is None:
            return f"holds NaN or infinity ({name})"
        # Masks, positions and small tensors may be zero.
        if not (top or may_be_zero or 2 * len(data) < longest or _SIDE.search(name)):
            return f"is all zeros ({name})"
    return None
