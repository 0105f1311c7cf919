"""Cache files: their origin in a header, and the same bytes for the same content.

A cache file is a safetensors file, or an npz file for sd-scripts (see npz.py). safetensors itself
writes metadata in no fixed order.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from latentmake import digest
from latentmake.errors import CacheError
from latentmake.files.safetensors import read_head
from latentmake.regular import open_regular

if TYPE_CHECKING:
    import torch

ADOPTED = "latentmake.adopted"
CAPTION = "latentmake.caption"
CHECKSUM = "latentmake.checksum"
KEY = "latentmake.key"
ORIGINAL_HEIGHT = "original_height"
ORIGINAL_WIDTH = "original_width"
RECIPE = "latentmake.recipe"
SOURCE = "latentmake.source"
VIEW = "latentmake.view"
BYTES = {"BF16": 2, "F16": 2, "F32": 4, "I64": 8}
"""Bytes of a number of each dtype, as safetensors names them."""


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
    """

    key: str
    source: str
    recipe: str
    adopted: str = ""
    checksum: str = ""
    picture: Picture | None = None
    view: str = ""


def target_key(source: str, recipe: str, view: str) -> str:
    """Return a target's key, of the digests of source and recipe, and its view."""
    return digest.of_bytes(f"{source}\n{recipe}\n{view}".encode())


def stamp(
    *, key: str, source: str, recipe: Mapping[str, object] | str, view: str = ""
) -> dict[str, str]:
    """Return the metadata that make a file one of ours; `recipe` may be its canonical JSON.

    Who writes the file puts the checksums in their places.
    """
    from latentmake.files import checksums

    text = recipe if isinstance(recipe, str) else digest.canonical(recipe)
    viewed = {VIEW: view} if view else {}
    return {KEY: key, SOURCE: source, RECIPE: text, **viewed, **checksums.PLACEHOLDERS}


def serialize(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> bytes:
    """Return the bytes of a safetensors file of CPU tensors, metadata first and in order."""
    return b"".join(pieces(tensors, metadata))


def pieces(
    tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]
) -> list[bytes | memoryview]:
    """Return the bytes of `serialize` in two pieces, the header's and the tensors'."""
    from safetensors.torch import save

    data = save({name: tensor.contiguous() for name, tensor in tensors.items()})
    (length,) = struct.unpack_from("<Q", data)
    body = memoryview(data)[8 + length :]
    return [head_of(json.loads(data[8 : 8 + length]), metadata, body), body]


def head_of(entries: Mapping[str, object], metadata: Mapping[str, str], body: memoryview) -> bytes:
    """Return the bytes of a safetensors file before those of its tensors, with their checksum.

    Args:
        entries: name of each tensor -> its JSON in the header.
        metadata: of the file.
        body: the tensors' bytes.
    """
    from latentmake.files import checksums

    header = {"__metadata__": checksums.filled(metadata, [body]), **entries}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of 8, as safetensors has it
    return struct.pack("<Q", len(text)) + checksums.sealed(text)


def read_header(path: str | os.PathLike[str]) -> Header:
    """Read the header of a cache file, and check that the file is complete; tensors are not read.

    Its name tells an npz file; so do its first bytes, since the store names files by key alone. A
    file that is cut short, damaged, or not one of ours is a CacheError.
    """
    if os.fspath(path).endswith(".npz"):
        return _read_npz(path)
    try:
        head = read_head(path)
    except ValueError as error:
        if _begins_an_npz(path):
            return _read_npz(path)
        raise CacheError(str(error), where=path) from None
    metadata = head.metadata
    recipe, key, source = (metadata.get(name) for name in (RECIPE, KEY, SOURCE))
    if not (isinstance(recipe, str) and isinstance(key, str) and isinstance(source, str)):
        raise CacheError("was not made by latentmake", where=path)
    try:
        content, picture = digest.of_bytes(recipe.encode()), _picture(metadata, recipe)
    except (ValueError, AttributeError, RecursionError):
        raise CacheError("has a damaged header", where=path) from None
    if not is_as_written(head.data, metadata):
        raise CacheError("was rewritten by another program", where=path)
    adopted, checksum, view = (str(metadata.get(x, "")) for x in (ADOPTED, CHECKSUM, VIEW))
    return Header(key, source, content, adopted, checksum, picture, view)


def read_metadata(path: str | os.PathLike[str]) -> dict[str, str]:
    """Return the metadata in the header of a cache file; empty where none can be read."""
    from latentmake.files import npz

    try:
        is_npz = os.fspath(path).endswith(".npz") or _begins_an_npz(path)
        found = json.loads(npz.read_comment(path)) if is_npz else read_head(path).metadata
        return {name: str(value) for name, value in found.items()}
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return {}


def read_recipe(path: str | os.PathLike[str]) -> dict[str, object]:
    """Return the recipe in the header of a cache file; empty where none can be read."""
    try:
        found = json.loads(read_metadata(path).get(RECIPE, "{}"))
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _picture(metadata: Mapping[str, str], recipe: str) -> Picture | None:
    width, height = (metadata.get(name) for name in (ORIGINAL_WIDTH, ORIGINAL_HEIGHT))
    if width is None or height is None:
        return None
    # A recipe names the keys that differ from their defaults.
    upright = bool(json.loads(recipe).get("exif_rotation", True))
    return Picture(int(str(width)), int(str(height)), upright)


def _begins_an_npz(path: str | os.PathLike[str]) -> bool:
    # As the length of a safetensors header, these bytes would be beyond the format's limit.
    from latentmake.files import npz

    try:
        file, _ = open_regular(path)
    except ValueError:
        return False
    with file:
        return file.read(len(npz.MAGIC)) == npz.MAGIC


def _read_npz(path: str | os.PathLike[str]) -> Header:
    from latentmake.files import npz

    try:
        comment = npz.read_comment(path)
    except ValueError as error:
        raise CacheError(str(error), where=path) from None
    try:
        metadata = json.loads(comment)
        key, source, recipe = (metadata[name] for name in (KEY, SOURCE, RECIPE))
        if not (isinstance(key, str) and isinstance(source, str)):
            raise TypeError("a key is text")
        content = digest.of_bytes(recipe.encode())
        adopted, checksum, view = (str(metadata.get(x, "")) for x in (ADOPTED, CHECKSUM, VIEW))
        return Header(key, source, content, adopted, checksum, None, view)
    except (ValueError, LookupError, AttributeError, TypeError, RecursionError):
        raise CacheError("was not made by latentmake", where=path) from None


def is_as_written(head: bytes, metadata: Mapping[str, object]) -> bool:
    """Whether a header is as `serialize` writes one, and of the caption that it was made from.

    musubi-tuner, encoding a text again, puts its own tensors into the file and leaves all metadata
    that it does not know, our key among them.
    """
    if not head.startswith(b'{"__metadata__":{', 8) or list(metadata) != sorted(metadata):
        return False
    caption = metadata.get(CAPTION)
    return caption is None or caption == digest.of_bytes(str(metadata.get("caption1")).encode())
