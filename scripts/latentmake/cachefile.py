"""Cache files: written whole or not at all, the same bytes for the same content, quick to check.

A cache file is a safetensors file whose header says what it was made from. safetensors itself
writes metadata in no fixed order and files that only their owner may read; both are put right here.
The format: 8 bytes with the header's length (little endian), a JSON header, the tensors' bytes
(https://github.com/huggingface/safetensors#format). sd-scripts reads npz instead: see npzfile.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from latentmake import digest, npzfile
from latentmake.errors import CacheError, storage_error
from latentmake.regular import open_regular

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
    "TEMPORARY_SUFFIX",
    "Header",
    "Picture",
    "link",
    "read_head",
    "read_header",
    "serialize",
    "stamp",
    "target_key",
    "write",
]

ADOPTED = "latentmake.adopted"
CAPTION = "latentmake.caption"
KEY = "latentmake.key"
ORIGINAL_HEIGHT = "original_height"
ORIGINAL_WIDTH = "original_width"
RECIPE = "latentmake.recipe"
SOURCE = "latentmake.source"
TEMPORARY_SUFFIX = ".latentmake-partial"
_MAX_HEADER = 100_000_000  # the format's own limit, in bytes


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


def _temporary(path: Path) -> Path:
    # Short, whatever the name's length; process and thread tell writers of one name apart.
    unique = f"{digest.of_bytes(path.name.encode())[:16]}.{os.getpid()}.{threading.get_ident()}"
    return path.with_name(f".{unique}{TEMPORARY_SUFFIX}")


def write(path: Path, data: bytes) -> None:
    """Write a file so that its name only ever stands for the whole of it.

    It is written under a temporary name in the same folder and renamed. There is no fsync: a file
    that a power failure cut short has the wrong length and is found damaged.

    Raises:
        StorageError: the disk is full or cannot be written.
        OSError: anything else the system refuses.
    """
    temporary = _temporary(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            file.write(data)
        temporary.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):  # on a read-only disk even that is refused
            temporary.unlink(missing_ok=True)
        raise storage_error(error, path) or error from None
    except BaseException:  # Ctrl-C
        temporary.unlink(missing_ok=True)
        raise


def link(existing: Path, path: Path) -> None:
    """Give a finished file a second name, replacing what bears it; copy where links fail.

    Raises:
        StorageError: the disk is full or cannot be written.
        OSError: anything else the system refuses.
    """
    temporary = _temporary(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.unlink(missing_ok=True)
        try:
            os.link(existing, temporary)
        except OSError:
            write(path, existing.read_bytes())
            return
        temporary.replace(path)
        temporary.unlink(missing_ok=True)  # rename does nothing between two names of one file
    except OSError as error:
        with contextlib.suppress(OSError):  # on a read-only disk even that is refused
            temporary.unlink(missing_ok=True)
        raise storage_error(error, path) or error from None


def read_head(path: str | os.PathLike[str]) -> tuple[bytes, int]:
    """Read what stands before the first tensor of a safetensors file, by one read as a rule.

    Returns:
        8 bytes with the length of the JSON that follows, and that JSON; and the size of the file
        (format: https://github.com/huggingface/safetensors#format).

    Raises:
        ValueError: it is cut short, no safetensors file, or no regular file at all.
        OSError: it cannot be read.
    """
    file, size = open_regular(path)
    with file:
        head = file.read(4096)
        length = struct.unpack_from("<Q", head)[0] if len(head) >= 8 else _MAX_HEADER
        if length >= _MAX_HEADER or 8 + length > size:
            raise ValueError("is cut short or no safetensors file")
        while len(head) < 8 + length:
            more = file.read(8 + length - len(head))
            if not more:
                raise ValueError("is cut short")
            head += more
    return head[: 8 + length], size


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
        head, size = read_head(path)
    except ValueError as error:
        if _begins_an_npz(path):
            return _read_npz(path)
        raise CacheError(str(error), where=path) from None
    try:
        text = head[8:]
        header = json.loads(text)
        metadata = header.pop("__metadata__", {})
        end = max((int(tensor["data_offsets"][1]) for tensor in header.values()), default=0)
        recipe, key, source = (metadata.get(name) for name in (RECIPE, KEY, SOURCE))
        content = digest.of_bytes(recipe.encode()) if isinstance(recipe, str) else None
        picture = _picture(metadata, recipe) if isinstance(recipe, str) else None
    except (ValueError, LookupError, AttributeError, TypeError, ArithmeticError, RecursionError):
        raise CacheError("has a damaged header", where=path) from None
    if len(head) + end != size:
        raise CacheError("is cut short or has grown", where=path)
    if not (content is not None and isinstance(key, str) and isinstance(source, str)):
        raise CacheError("was not made by latentmake", where=path)
    if not _is_as_written(text, metadata):
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
        return file.read(len(npzfile.MAGIC)) == npzfile.MAGIC


def _read_npz(path: str | os.PathLike[str]) -> Header:
    try:
        comment = npzfile.read_comment(path)
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


def _is_as_written(text: bytes, metadata: Mapping[str, object]) -> bool:
    """Whether a header is as `serialize` writes one, and of the caption that it was made of.

    musubi-tuner, encoding a text again, puts its own tensors into the file and leaves all metadata
    that it does not know, our key among them.
    """
    if not text.startswith(b'{"__metadata__":{') or list(metadata) != sorted(metadata):
        return False
    caption = metadata.get(CAPTION)
    return caption is None or caption == digest.of_bytes(str(metadata.get("caption1")).encode())
