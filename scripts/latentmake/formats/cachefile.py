"""Writing of cache files and reading of their headers, which record the origin of a file.

A cache file is a safetensors file, an npz file for sd-scripts (see npz.py), or the JSON of a made
caption. The same content gives the same bytes. So files are written here: the library writes
metadata in no fixed order.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from latentmake.base import atomic, digest
from latentmake.base.errors import CacheError
from latentmake.base.regular import open_regular
from latentmake.formats.safetensors import CHECKSUM, DTYPES, PLACEHOLDERS, filled, read_head, sealed

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

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_ORDER = [*_NAMES]


class Header(NamedTuple):
    """Origin of a cache file.

    Attributes:
        key: key of the target.
        source: digest of the source.
        recipe: digest of the recipe.
        adopted: digests of the other program's files that it was adopted from, separated by spaces;
            "" if it was encoded.
        checksum: checksum of the tensors' bytes; "" in a file of an older release.
        picture: width and height of the image in pixels, before it was scaled and cropped, and
            whether it was rotated by its EXIF orientation; only if the header of latents has them.
        view: settings that scaled and cropped the image, as canonical JSON; "" for the defaults.
        caption: caption that was encoded, if the header of an embedding records it.
    """

    key: str
    source: str
    recipe: str
    adopted: str = ""
    checksum: str = ""
    picture: tuple[int, int, bool] | None = None
    view: str = ""
    caption: str | None = None


def target_key(source: str, recipe: str, view: str) -> str:
    """Return a target's key: a digest of its source's digest, its recipe's digest and its view."""
    return digest.of_bytes(f"{source}\n{recipe}\n{view}".encode())


def stamp(
    *, key: str, source: str, recipe: Mapping[str, object] | str, view: str = ""
) -> dict[str, str]:
    """Return the metadata of a file of ours; `recipe` may be a mapping or its canonical JSON.

    They contain placeholders, which the functions that write the file replace by the checksums.
    """
    text = recipe if isinstance(recipe, str) else digest.canonical(recipe)
    viewed = {VIEW: view} if view else {}
    return {KEY: key, SOURCE: source, RECIPE: text, **viewed, **PLACEHOLDERS}


def serialize(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> bytes:
    """Return the bytes of a safetensors file with these tensors; metadata come first, sorted."""
    return b"".join(pieces(tensors, metadata))


def pieces(
    tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]
) -> list[bytes | memoryview]:
    """Return the bytes of `serialize` in pieces: the header, then each tensor without a copy.

    `safetensors.torch.save` would copy all bytes twice while it holds the GIL: an embedding of T5
    (4 MB) takes it 4 ms, and this function 0.1 ms.
    """
    import torch

    entries, body, end = dict[str, object](), list[memoryview](), 0
    named = ((str(tensor.dtype).partition(".")[2], name) for name, tensor in tensors.items())
    for dtype, name in sorted(named, key=lambda pair: (_ORDER.index(pair[0]), pair[1])):
        flat = tensors[name].detach().cpu().contiguous().view(-1)
        body.append(flat.view(torch.uint8).numpy().data)
        begin, end = end, end + len(body[-1])
        entries[name] = {
            "dtype": _NAMES[dtype],
            "shape": [*tensors[name].shape],
            "data_offsets": [begin, end],
        }
    return [head_of(entries, metadata, *body), *body]


def head_of(entries: Mapping[str, object], metadata: Mapping[str, str], *body: memoryview) -> bytes:
    """Return the start of a safetensors file: the header's length, and the header with checksums.

    Args:
        entries: name of a tensor -> its JSON in the header.
        metadata: metadata of the file.
        body: bytes of the tensors, in one piece or several.
    """
    header = {"__metadata__": filled(metadata, body), **entries}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # safetensors aligns the tensors to 8 bytes
    return struct.pack("<Q", len(text)) + sealed(text)


def caption_file(text: str, metadata: Mapping[str, str]) -> bytes:
    """Return the bytes of the file of a made caption: JSON with its text and its origin.

    Args:
        text: text as the captioner returned it.
        metadata: origin of the file, see `stamp`.
    """
    origin = {"key": metadata[KEY], "source": metadata[SOURCE], "view": metadata.get(VIEW, "")}
    values = {"text": text, **origin, "recipe": json.loads(metadata[RECIPE])}
    # It shows that somebody edited the file: edits belong into a caption file beside the picture.
    values["checksum"] = digest.of_bytes(text.encode())
    return f"{json.dumps(values, indent=1, ensure_ascii=False)}\n".encode()


def made_caption(data: bytes) -> dict[str, str]:
    """Return the metadata in the file of a made caption, with its text as `caption`.

    Raises:
        ValueError: the file is damaged, was edited, or another program wrote it.
    """
    try:
        values = json.loads(data)
        text, recipe = values["text"], digest.canonical(values["recipe"])
        origin = {KEY: values["key"], SOURCE: values["source"], RECIPE: recipe}
        if values["checksum"] != digest.of_bytes(text.encode()):
            raise ValueError("was edited; write the caption into a file beside the picture instead")
    except (KeyError, TypeError, AttributeError, RecursionError, UnicodeError):
        raise ValueError(FOREIGN) from None
    view = {VIEW: values["view"]} if values.get("view") else {}
    return {**origin, **view, "caption": text}


def describe_copy(path: Path, copy: Path, metadata: Mapping[str, str]) -> None:
    """Write a copy of a safetensors file with other metadata; its tensors keep their bytes.

    `copy` may be the path of the file itself.

    Raises:
        ValueError: the file is cut short, damaged, or no safetensors file.
        OSError: a file cannot be read or written.
    """
    head = read_head(path)
    with open_regular(path)[0] as file, atomic.replacing(copy) as new, new.open("wb") as written:
        file.seek(len(head.data))
        written.write(head_of(head.entries, metadata))
        shutil.copyfileobj(file, written, 1 << 20)


def read_header(path: str | os.PathLike[str]) -> Header:
    """Read the header of a cache file without its tensors, and check that the file is complete.

    Raises:
        CacheError: the file is cut short, damaged, or was not written by Latentmake.
        OSError: the file cannot be read.
    """
    try:
        return parse_header(*_read(path))
    except ValueError as error:
        raise CacheError(str(error), where=path) from None


def header_of(path: str | os.PathLike[str]) -> Header | None:
    """Return the header of a file of ours; None if it is missing or any other file."""
    try:
        return read_header(path)
    except (CacheError, OSError):
        return None


def read_metadata(path: str | os.PathLike[str]) -> dict[str, str]:
    """Return the metadata in the header of a cache file; empty if they cannot be read."""
    try:
        return {name: str(value) for name, value in _read(path)[0].items()}
    except (OSError, ValueError):
        return {}


def shapes_in(path: str | os.PathLike[str]) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of a file's arrays from headers; raises OSError, ValueError."""
    from latentmake.formats import npz

    try:
        return {name: tensor.shape for name, tensor in read_head(path).tensors.items()}
    except ValueError:  # an npz file, see `_read`
        return dict(npz.shapes_of(path))


def recipe_of(metadata: Mapping[str, str]) -> dict[str, object]:
    """Return the recipe in a file's metadata; empty if there is none."""
    try:
        recipe = json.loads(metadata.get(RECIPE, "{}"))
    except (ValueError, TypeError, RecursionError):
        return {}
    return recipe if isinstance(recipe, dict) else {}


def _read(path: str | os.PathLike[str]) -> tuple[dict[str, Any], bytes]:
    """Return the metadata of a cache file and the bytes of its safetensors header; b"" for npz.

    The format is recognised by the first bytes: in the store, a file's name is only its key.
    """
    from latentmake.formats import npz  # imported late: a plan with nothing to do reads no header

    if not os.fspath(path).endswith(".npz"):
        try:
            head = read_head(path)
            return head.metadata, head.data
        except ValueError:
            # An npz file always fails as safetensors: its first bytes, read as the length of a
            # header, are beyond the format's limit.
            with open_regular(path)[0] as file:
                start = file.read(len(npz.MAGIC))
                if start.startswith(b"{"):  # as a length it is beyond the limit, too
                    return made_caption(start + file.read()), b""
                if start != npz.MAGIC:
                    raise
    return npz.read_metadata(path), b""


# Many files have one recipe.
@lru_cache(64)
def _digest_of(recipe: str) -> str:
    return digest.of_bytes(recipe.encode())


@lru_cache(64)
def _is_upright(recipe: str) -> bool:
    # A recipe contains only keys that differ from their defaults.
    return bool(json.loads(recipe).get("exif_rotation", True))


def parse_header(metadata: Mapping[str, Any], head: bytes) -> Header:
    """Return the origin of a file from its metadata and the bytes of its safetensors header.

    When musubi-tuner encodes a caption again, it replaces the tensors in the file and keeps the
    metadata that it does not know, including our key. Such a file is refused.

    Raises:
        ValueError: the file is damaged, or another program wrote it.
    """
    if KEY not in metadata:
        raise ValueError(FOREIGN)
    key, source, recipe = metadata[KEY], metadata.get(SOURCE), metadata.get(RECIPE)
    if not (isinstance(key, str) and isinstance(source, str) and isinstance(recipe, str)):
        raise ValueError("has a damaged header")
    try:
        content, picture = _digest_of(recipe), None
        if ORIGINAL_WIDTH in metadata and ORIGINAL_HEIGHT in metadata:
            upright = _is_upright(recipe)
            width, height = int(str(metadata[ORIGINAL_WIDTH])), int(str(metadata[ORIGINAL_HEIGHT]))
            picture = width, height, upright
        same = CAPTION not in metadata or metadata[CAPTION] == digest.of_bytes(
            str(metadata.get("caption1")).encode()
        )
    except (ValueError, AttributeError, RecursionError):
        raise ValueError("has a damaged header") from None
    # Our metadata come first and are sorted. The safetensors library writes them in no fixed order.
    if head and not (
        same and head.startswith(b'{"__metadata__":{', 8) and list(metadata) == sorted(metadata)
    ):
        raise ValueError("was rewritten by another program")
    adopted, view = str(metadata.get(ADOPTED, "")), str(metadata.get(VIEW, ""))
    caption = metadata.get("caption", metadata.get("caption1"))
    caption = caption if isinstance(caption, str) else None
    seal = str(metadata.get(CHECKSUM, ""))
    return Header(key, source, content, adopted, seal, picture, view, caption)
