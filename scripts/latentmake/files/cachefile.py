"""Cache files: their origin in a header, the same bytes for the same content, and their check.

A cache file is a safetensors file, or an npz file for sd-scripts (see npz.py). safetensors itself
writes metadata in no fixed order.
"""

from __future__ import annotations

import json
import os
import re
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from latentmake import digest
from latentmake.errors import CacheError
from latentmake.files.safetensors import (
    CHECKSUM,
    DTYPES,
    HEADER_CHECKSUM,
    PLACEHOLDERS,
    checksum,
    filled,
    is_sealed,
    largest,
    parse_head,
    read_head,
    sealed,
)
from latentmake.regular import open_regular, read_regular

if TYPE_CHECKING:
    import torch

ADOPTED = "latentmake.adopted"
CAPTION = "latentmake.caption"
KEY = "latentmake.key"
ORIGINAL_HEIGHT = "original_height"
ORIGINAL_WIDTH = "original_width"
RECIPE = "latentmake.recipe"
SOURCE = "latentmake.source"
VIEW = "latentmake.view"
FOREIGN = "was not made by latentmake"

_SIDE = re.compile("mask|original_size|crop_ltrb|txt_ids|latents_clean")  # these may be zero
_Bytes = bytes | memoryview
_NAMES = {dtype.name: name for name, dtype in DTYPES.items()}
_ORDER = [*_NAMES]


class Picture(NamedTuple):
    """Size of an image in pixels, before it was scaled and cropped.

    Attributes:
        upright: whether it was turned as its EXIF orientation says.
    """

    width: int
    height: int
    upright: bool


class Header(NamedTuple):
    """Origin of a cache file.

    Attributes:
        source: digest of the source.
        recipe: digest of the recipe.
        adopted: digests of another program's files that it was taken from, separated by spaces;
            "" where it was encoded.
        checksum: of the tensors' bytes; "" in a file of an older release.
        picture: size of the encoded image, where the header of latents tells it.
        view: settings that placed the image, as canonical JSON; "" where all had their defaults.
        caption: that was encoded, where the header of an embedding tells it.
    """

    key: str
    source: str
    recipe: str
    adopted: str = ""
    checksum: str = ""
    picture: Picture | None = None
    view: str = ""
    caption: str | None = None


def target_key(source: str, recipe: str, view: str) -> str:
    """Return a target's key, of the digests of source and recipe, and its view."""
    return digest.of_bytes(f"{source}\n{recipe}\n{view}".encode())


def stamp(
    *, key: str, source: str, recipe: Mapping[str, object] | str, view: str = ""
) -> dict[str, str]:
    """Return the metadata that make a file one of ours; `recipe` may be its canonical JSON.

    Who writes the file puts the checksums in their places.
    """
    text = recipe if isinstance(recipe, str) else digest.canonical(recipe)
    viewed = {VIEW: view} if view else {}
    return {KEY: key, SOURCE: source, RECIPE: text, **viewed, **PLACEHOLDERS}


def serialize(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> bytes:
    """Return the bytes of a safetensors file of CPU tensors, metadata first and in order."""
    return b"".join(pieces(tensors, metadata))


def pieces(
    tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]
) -> list[bytes | memoryview]:
    """Return the bytes of `serialize` in pieces: the header's, and each tensor's without a copy.

    Like `safetensors.torch.save`, which copies all bytes twice while no other thread runs: a T5's
    embedding of 4 MB takes it 4 ms, and this 0.1.
    """
    import torch

    entries, found, end = dict[str, object](), list[memoryview](), 0
    named = ((str(each.dtype).partition(".")[2], name) for name, each in tensors.items())
    for dtype, name in sorted(named, key=lambda each: (_ORDER.index(each[0]), each[1])):
        flat = tensors[name].detach().cpu().contiguous().view(-1)
        found.append(flat.view(torch.uint8).numpy().data)
        begin, end = end, end + len(found[-1])
        entries[name] = {
            "dtype": _NAMES[dtype],
            "shape": [*tensors[name].shape],
            "data_offsets": [begin, end],
        }
    return [head_of(entries, metadata, *found), *found]


def head_of(entries: Mapping[str, object], metadata: Mapping[str, str], *body: memoryview) -> bytes:
    """Return the bytes of a safetensors file before those of its tensors, with their checksum.

    Args:
        entries: name of each tensor -> its JSON in the header.
        metadata: of the file.
        body: the tensors' bytes, in one piece or several.
    """
    header = {"__metadata__": filled(metadata, body), **entries}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of 8, as safetensors has it
    return struct.pack("<Q", len(text)) + sealed(text)


def read_header(path: str | os.PathLike[str]) -> Header:
    """Read the header of a cache file, and check that the file is complete; tensors are not read.

    A file that is cut short, damaged, or not one of ours is a CacheError.
    """
    try:
        return parse_header(*_read(path))
    except ValueError as error:
        raise CacheError(str(error), where=path) from None


def header_of(path: Path) -> Header | None:
    """Return the header of a file of ours; None for another file, or none."""
    try:
        return read_header(path)
    except (CacheError, OSError):
        return None


def read_metadata(path: str | os.PathLike[str]) -> dict[str, str]:
    """Return the metadata in the header of a cache file; empty where none can be read."""
    try:
        return {name: str(value) for name, value in _read(path)[0].items()}
    except (OSError, ValueError):
        return {}


def arrays_in(path: str | os.PathLike[str]) -> list[tuple[str, str, tuple[int, ...]]]:
    """Return name, dtype and shape of each array of a cache file; only headers are read.

    Raises:
        OSError, ValueError: the file cannot be read, or is damaged.
    """
    from latentmake.files import npz

    with open_regular(path)[0] as file:
        is_npz = file.read(len(npz.MAGIC)) == npz.MAGIC
    if is_npz:
        return [*npz.arrays_of(path)]
    return [(name, each.dtype, each.shape) for name, each in read_head(path).tensors.items()]


def recipe_of(metadata: Mapping[str, str]) -> dict[str, object]:
    """Return the recipe in a file's metadata; empty where there is none."""
    try:
        found = json.loads(metadata.get(RECIPE, "{}"))
    except (ValueError, TypeError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _read(path: str | os.PathLike[str]) -> tuple[dict[str, Any], bytes]:
    """Return the metadata of a cache file, and the bytes of a safetensors header.

    Its name tells an npz file; so do its first bytes, since the store names files by key alone.
    """
    from latentmake.files import npz  # a plan with nothing to do reads no header

    if not os.fspath(path).endswith(".npz"):
        try:
            head = read_head(path)
            return head.metadata, head.data
        except ValueError:
            # As the length of a safetensors header, these bytes would be beyond the format's limit.
            with open_regular(path)[0] as file:
                if file.read(len(npz.MAGIC)) != npz.MAGIC:
                    raise
    return npz.read_metadata(path), b""


def parse_header(metadata: Mapping[str, Any], head: bytes) -> Header:
    """Return the origin of a file, by its metadata and the bytes of a safetensors header.

    musubi-tuner, encoding a text again, puts its own tensors into the file and leaves all metadata
    that it does not know, our key among them.

    Raises:
        ValueError: it is damaged, or not one of ours.
    """
    if KEY not in metadata:
        raise ValueError(FOREIGN)
    key, source, recipe = metadata[KEY], metadata.get(SOURCE), metadata.get(RECIPE)
    if not (isinstance(key, str) and isinstance(source, str) and isinstance(recipe, str)):
        raise ValueError("has a damaged header")
    try:
        content, picture = digest.of_bytes(recipe.encode()), None
        if ORIGINAL_WIDTH in metadata and ORIGINAL_HEIGHT in metadata:
            # A recipe names the keys that differ from their defaults.
            upright = bool(json.loads(recipe).get("exif_rotation", True))
            width, height = (int(str(metadata[x])) for x in (ORIGINAL_WIDTH, ORIGINAL_HEIGHT))
            picture = Picture(width, height, upright)
        same = CAPTION not in metadata or metadata[CAPTION] == digest.of_bytes(
            str(metadata.get("caption1")).encode()
        )
    except (ValueError, AttributeError, RecursionError):
        raise ValueError("has a damaged header") from None
    if head and not (
        same and head.startswith(b'{"__metadata__":{', 8) and list(metadata) == sorted(metadata)
    ):
        raise ValueError("was rewritten by another program")
    adopted, view = str(metadata.get(ADOPTED, "")), str(metadata.get(VIEW, ""))
    caption = metadata.get("caption", metadata.get("caption1"))
    caption = caption if isinstance(caption, str) else None
    seal = str(metadata.get(CHECKSUM, ""))
    return Header(key, source, content, adopted, seal, picture, view, caption)


# -- check of a whole file ------------------------------------------------------------------------


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
    """Read a cache file and check it, see `check`; several threads may do so at a time.

    Raises:
        OSError: it is gone or cannot be read.
    """
    return check(read_regular(path, None), values=values)


def check(data: bytes, *, values: bool = True) -> Checked:
    """Check the bytes of a cache file.

    `values` tells whether NaN, infinity and tensors of zeros are looked for. An embedding may be
    zeros, as that of an empty caption.
    """
    from latentmake.files import npz

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
    from latentmake.files.npz import parse_array

    name, data = member
    dtype, _, start = parse_array(data)
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
