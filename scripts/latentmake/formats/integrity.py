"""Check of a complete cache file: its header, its checksums and its values."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from latentmake.base.regular import read_regular
from latentmake.formats import npz
from latentmake.formats.cachefile import (
    FOREIGN,
    KEY,
    Header,
    made_caption,
    parse_header,
    recipe_of,
)
from latentmake.formats.safetensors import (
    CHECKSUM,
    HEADER_CHECKSUM,
    checksum,
    is_sealed,
    parse_head,
    read_head,
)

_SIDE = re.compile("mask|original_size|crop_ltrb|txt_ids|latents_clean")  # these may be zero

FLOATS = {"F64": (8, 0x7FF << 52), "F32": (4, 0x7F8 << 20), "BF16": (2, 0x7F80), "F16": (2, 0x7C00)}
"""Name in safetensors -> size in bytes, and mask of the exponent: all set in NaN and infinity."""

_Bytes = bytes | memoryview


class Checked(NamedTuple):
    """Result of a check.

    Attributes:
        damage: fault of the file: None if it is sound, `FOREIGN` if another program wrote it.
        header: origin of the file; None if it cannot be read.
        recipe: recipe in the header; empty if there is none.
    """

    damage: str | None
    header: Header | None = None
    recipe: Mapping[str, object] = MappingProxyType({})

    @property
    def is_foreign(self) -> bool:
        """Whether another program wrote the file."""
        return self.damage == FOREIGN

    @property
    def has_checksum(self) -> bool:
        """Whether the header has a checksum; files of older releases have none."""
        return self.header is not None and self.header.checksum != ""


def verify(path: str | os.PathLike[str], *, values: bool = True) -> Checked:
    """Read a cache file and check it, see `check`; raises OSError. Any thread may call this."""
    return check(read_regular(path, None), values=values)


def check(data: bytes, *, values: bool = True) -> Checked:
    """Check the bytes of a cache file.

    With `values`, NaN, infinity and tensors of zeros are faults. An embedding may be zeros, for
    example the embedding of an empty caption.
    """
    if data.startswith(b"{"):
        try:
            made = made_caption(data)
            return Checked(None, parse_header(made, b""), recipe_of(made))
        except ValueError as error:
            return Checked(str(error))
    is_npz, origin, metadata = data.startswith(npz.MAGIC), None, dict[str, Any]()
    tensors: Iterable[_Bytes]
    arrays: dict[str, tuple[str, _Bytes]]
    try:
        if is_npz:
            metadata = npz.metadata_of(npz.comment_of(data, len(data)))
            origin = parse_header(metadata, b"")
            header, members = npz.split(data)
            tensors, arrays = members.values(), {}
            for name, member in members.items():
                dtype, _, start = npz.parse_array(member)
                arrays[name.removesuffix(".npy")] = dtype, memoryview(member)[start:]
        else:
            head = parse_head(data)
            metadata, header = head.metadata, head.data[8:]
            origin, body = parse_header(metadata, head.data), memoryview(data)[len(head.data) :]
            tensors = [body]
            arrays = {
                name: (tensor.dtype, body[tensor.start : tensor.end])
                for name, tensor in head.tensors.items()
            }
    except ValueError as error:
        # A damaged file of ours may lack its key. The key of an npz file is at its end, which may
        # be cut off, and a crash may leave a file of zeros.
        is_lost = str(error) != FOREIGN and (is_npz or not data.strip(b"\0"))
        if is_lost or KEY.encode() in data:
            return Checked(str(error), origin, recipe_of(metadata))
        return Checked(FOREIGN)
    damage, recipe = None, recipe_of(metadata)
    # Files of older releases have no checksums.
    if not metadata.keys().isdisjoint((CHECKSUM, HEADER_CHECKSUM)):
        if not is_sealed(header, metadata.get(HEADER_CHECKSUM)):
            damage = "has a damaged header"
        elif origin.checksum != checksum(tensors):
            damage = "checksum differs"
    if damage is None and values:
        damage = _values_fault(arrays, may_be_zero=recipe.get("kind") == "text")
    return Checked(damage, origin, recipe)


def _values_fault(arrays: Mapping[str, tuple[str, _Bytes]], *, may_be_zero: bool) -> str | None:
    longest = max((len(data) for _, data in arrays.values()), default=0)
    for name, (dtype, data) in arrays.items():
        top = largest(dtype, data)
        if top is None:
            return f"holds NaN or infinity ({name})"
        # Masks, positions and tensors of less than half the longest size may be all zeros.
        if not (top or may_be_zero or 2 * len(data) < longest or _SIDE.search(name)):
            return f"is all zeros ({name})"
    return None


def largest(dtype: str, data: bytes | memoryview) -> int | None:
    """Return the largest bit pattern of floating-point numbers; None if one is NaN or infinite.

    The result is 0 only if all numbers are zeros. It is None, too, if the bytes are not a multiple
    of the dtype's size, and 1 for other dtypes.

    Bit patterns are compared as integers, because numpy has no type for bfloat16. A number is NaN
    or infinite if all bits of its exponent are set.
    """
    import numpy as np  # imported late: planning only reads headers

    if dtype not in FLOATS:
        return 1
    size, exponent = FLOATS[dtype]
    if len(data) % size:
        return None
    bits = np.frombuffer(data, f"<u{size}")
    highest = np.maximum.reduce  # faster than `max`, which calls it
    if highest(bits & exponent, initial=0) == exponent:
        return None
    return int(highest(bits, initial=0))


def is_complete(path: Path) -> bool:
    """Whether a safetensors file is complete; a file that cannot be read may be."""
    try:
        read_head(path)
    except OSError:
        return True
    except ValueError:
        return False
    return True


def fault_of_weights(path: Path, beginning: str = "") -> str | None:
    """Return why a file cannot be the result of a training; None if it is complete.

    `beginning` is a prefix that some tensor's name must have.
    """
    try:
        head = read_head(path)
        tensors = head.tensors
    except FileNotFoundError:
        return "is not there"
    except (OSError, ValueError) as error:
        return str(error)
    if not tensors:
        return "holds no tensor"
    if not any(name.startswith(beginning) for name in tensors):
        return f"holds no tensor {beginning}*"
    with path.open("rb") as file:
        for name, tensor in tensors.items():
            file.seek(len(head.data) + tensor.start)
            if largest(tensor.dtype, file.read(tensor.end - tensor.start)) is None:
                return f"holds values that are not finite ({name})"
    return None
