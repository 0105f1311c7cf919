"""Cache files: their origin in a header, the same bytes for the same content, and their check.

A cache file is a safetensors file, or an npz file for sd-scripts (see npz.py). safetensors itself
writes metadata in no fixed order.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from latentmake import digest
from latentmake.errors import CacheError
from latentmake.files.safetensors import CHECKSUM, DTYPES, PLACEHOLDERS, filled, read_head, sealed
from latentmake.regular import open_regular

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
    """Return name, dtype and shape of a file's arrays, by headers; raises OSError, ValueError."""
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
