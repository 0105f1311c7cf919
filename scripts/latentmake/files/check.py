"""Check of a whole cache file: its header, its checksums and its values."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
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
    parse_head,
    read_head,
)
from latentmake.regular import read_regular

_SIDE = re.compile("mask|original_size|crop_ltrb|txt_ids|latents_clean")  # these may be zero

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
    """Read a cache file and check it, see `check`, in any thread; raises OSError."""
    return check(read_regular(path, None), values=values)


def check(data: bytes, *, values: bool = True) -> Checked:
    """Check the bytes of a cache file.

    `values` tells whether NaN, infinity and tensors of zeros are looked for. An embedding may be
    zeros, as that of an empty caption.
    """
    is_npz, origin, metadata = data.startswith(npz.MAGIC), None, dict[str, Any]()
    tensors: Iterable[_Bytes]
    try:
        if is_npz:
            metadata = npz.metadata_of(npz.comment_of(data, len(data)))
            origin = parse_header(metadata, b"")
            header, members = npz.split(data)
            tensors, arrays = members.values(), dict(map(_array, members.items()))
        else:
            head = parse_head(data)
            metadata, header = head.metadata, head.data[8:]
            origin, body = parse_header(metadata, head.data), memoryview(data)[len(head.data) :]
            found = head.tensors.items()
            tensors, arrays = [body], {name: (x.dtype, body[x.start : x.end]) for name, x in found}
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
        elif origin.checksum != checksum(tensors):
            damage = "checksum differs"
    if damage is None and values:
        damage = _values_fault(arrays, may_be_zero=recipe.get("kind") == "text")
    return Checked(damage, origin, recipe)


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


def not_finite(path: Path) -> Iterator[str]:
    """Yield the names of the tensors that hold NaN or infinite values."""
    head = read_head(path)
    with path.open("rb") as file:
        for name, tensor in head.tensors.items():
            file.seek(len(head.data) + tensor.start)
            if largest(tensor.dtype, file.read(tensor.end - tensor.start)) is None:
                yield name


def largest(dtype: str, data: bytes | memoryview) -> int | None:
    """Return the bits of the largest value of floating-point numbers; None where one is NaN.

    Infinite ones count as NaN, and so do bytes of which a part is left; other dtypes give 1.
    Without a copy: a number that is not finite is above its exponent, as a signed number or, where
    negative, an unsigned one.
    """
    import numpy as np  # planning reads headers alone, and does without

    if dtype not in DTYPES or not DTYPES[dtype].exponent:
        return 1
    _, size, exponent, _ = DTYPES[dtype]
    if len(data) % size:
        return None
    highest = np.maximum.reduce  # what `max` calls, by a detour
    top = int(highest(np.frombuffer(data, f"<u{size}"), initial=0))
    if top >= exponent | 1 << 8 * size - 1:
        return None
    signed = int(highest(np.frombuffer(data, f"<i{size}"), initial=0))
    return None if signed >= exponent else top
