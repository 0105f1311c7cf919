"""Cache files: written whole or not at all, the same bytes for the same content, quick to check.

A cache file is a safetensors file whose header says what it was made from. safetensors itself
writes metadata in no fixed order and files that only their owner may read; both are put right here.
The format: 8 bytes with the header's length (little endian), a JSON header, the tensors' bytes
(https://github.com/huggingface/safetensors#format). sd-scripts reads npz instead: see npzfile.py.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from latentmake import digest
from latentmake.errors import CacheError
from latentmake.files import npz
from latentmake.files.regular import open_regular
from latentmake.files.safetensors import read_head

if TYPE_CHECKING:
    import torch

__all__ = [
    "ADOPTED",
    "CAPTION",
    "KEY",
    "ORIGINAL_HEIGHT",
    "ORIGINAL_WIDTH",
    "RECIPE",
    "SOURCE",
    "Header",
    "Picture",
    "read_header",
    "serialize",
    "stamp",
    "target_key",
]

ADOPTED = "latentmake.adopted"
CAPTION = "latentmake.caption"
KEY = "latentmake.key"
ORIGINAL_HEIGHT = "original_height"
ORIGINAL_WIDTH = "original_width"
RECIPE = "latentmake.recipe"
SOURCE = "latentmake.source"


class Picture(NamedTuple):
    """The size of an image, before it was scaled and cut.

    Attributes:
        width: in pixels.
        height: likewise.
        upright: whether it was turned as its EXIF orientation says.
    """

    width: int
    height: int
    upright: bool


class Header(NamedTuple):
    """What a cache file's header says of its making.

    Attributes:
        key: its key.
        source: digest of the source.
        recipe: digest of the recipe.
        adopted: digests of the files of another program that it was taken from, with spaces
            between; "" where it was encoded.
        picture: of latents whose header tells it: size of the image that was encoded.
    """

    key: str
    source: str
    recipe: str
    adopted: str = ""
    picture: Picture | None = None


def target_key(source: str, recipe: str, variant: str) -> str:
    """Return the key of a target: the digest of what shapes its bytes.

    Args:
        source: digest of the source's bytes.
        recipe: digest of the recipe.
        variant: what is done to the source, as its layout says it; "" for text.
    """
    return digest.of_bytes(f"{source}\n{recipe}\n{variant}".encode())


def stamp(*, key: str, source: str, recipe: Mapping[str, object]) -> dict[str, str]:
    """Return the metadata that make a file one of ours."""
    return {KEY: key, SOURCE: source, RECIPE: digest.canonical(recipe)}


def serialize(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> bytes:
    """Return the bytes of a safetensors file, metadata first and in order.

    Args:
        tensors: contiguous CPU tensors of any shape, by name.
        metadata: the header's `__metadata__`.
    """
    from safetensors.torch import save

    data = save({name: tensor.contiguous() for name, tensor in tensors.items()})
    (length,) = struct.unpack_from("<Q", data)
    header = {"__metadata__": dict(sorted(metadata.items())), **json.loads(data[8 : 8 + length])}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of 8, as safetensors has it
    return struct.pack("<Q", len(text)) + text + data[8 + length :]


def read_header(path: str | os.PathLike[str]) -> Header:
    """Read what a cache file says of itself, and check that it is whole; tensors are not read.

    Its name tells an npz file; so do its first bytes, for the spool names files by key alone.

    Raises:
        CacheError: it is cut short, is no such file, or not one of ours.
        OSError: it cannot be read.
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
    try:
        recipe, key, source = (metadata.get(name) for name in (RECIPE, KEY, SOURCE))
        content = digest.of_bytes(recipe.encode()) if isinstance(recipe, str) else None
        picture = _picture(metadata, recipe) if isinstance(recipe, str) else None
    except (ValueError, LookupError, AttributeError, TypeError, RecursionError):
        raise CacheError("has a damaged header", where=path) from None
    if not (content is not None and isinstance(key, str) and isinstance(source, str)):
        raise CacheError("was not made by latentmake", where=path)
    if not _is_as_written(head.data, metadata):
        raise CacheError("was rewritten by another program", where=path)
    return Header(key, source, content, str(metadata.get(ADOPTED, "")), picture)


def _picture(metadata: Mapping[str, str], recipe: str) -> Picture | None:
    size = [metadata.get(name) for name in (ORIGINAL_WIDTH, ORIGINAL_HEIGHT)]
    if None in size:
        return None
    width, height = (int(str(side)) for side in size)
    # A recipe names the keys that differ from their defaults.
    return Picture(width, height, bool(json.loads(recipe).get("exif_rotation", True)))


def _begins_an_npz(path: str | os.PathLike[str]) -> bool:
    # As the length of a safetensors header these bytes would be beyond all measure.
    try:
        file, _ = open_regular(path)
    except ValueError:
        return False
    with file:
        return file.read(len(npz.MAGIC)) == npz.MAGIC


def _read_npz(path: str | os.PathLike[str]) -> Header:
    try:
        comment = npz.read_comment(path)
    except ValueError as error:
        raise CacheError(str(error), where=path) from None
    try:
        metadata = json.loads(comment)
        key, source, recipe = (metadata[name] for name in (KEY, SOURCE, RECIPE))
        content = digest.of_bytes(recipe.encode())
        if not (isinstance(key, str) and isinstance(source, str)):
            raise TypeError("a key is text")
    except (ValueError, LookupError, AttributeError, TypeError, RecursionError):
        raise CacheError("was not made by latentmake", where=path) from None
    return Header(key, source, content, str(metadata.get(ADOPTED, "")))


def _is_as_written(head: bytes, metadata: Mapping[str, object]) -> bool:
    """Whether a header is as `serialize` writes one, and of the caption that it was made of.

    musubi-tuner, encoding a text again, puts its own tensors into the file and leaves all metadata
    that it does not know, our key among them.
    """
    if not head.startswith(b'{"__metadata__":{', 8) or list(metadata) != sorted(metadata):
        return False
    caption = metadata.get(CAPTION)
    return caption is None or caption == digest.of_bytes(str(metadata.get("caption1")).encode())
