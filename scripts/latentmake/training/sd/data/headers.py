"""Where a tensor lies in its cache file: what is known of it before its bytes are read.

A training looks at the headers of all its caches once, before the first step. The header is read by
hand, which costs about half of what opening the file with safetensors does.
"""

from __future__ import annotations

import os
import sys
import zlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from latentmake.errors import CacheError
from latentmake.files.safetensors import read_head
from latentmake.layouts import plain

__all__ = [
    "DTYPES",
    "HIDDEN_STATE",
    "LATENTS",
    "MEND",
    "Scale",
    "Stored",
    "inspect",
    "inspect_all",
    "read_scale",
    "read_tensor",
    "read_text",
]

HIDDEN_STATE = plain.hidden_state(0)
LATENTS = plain.LATENTS
MEND = "delete it and give the build's command again, which encodes it anew"
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}

_DIMENSIONS = {LATENTS: 3, HIDDEN_STATE: 2}
_THREADS = 8  # that read headers: a disk or a network answers several at once
_CHUNK = 256  # files a thread takes at a time


class Stored(NamedTuple):
    """A tensor in a cache file.

    Attributes:
        path: of the file.
        header: bytes before the first tensor.
        check: CRC-32 of these bytes; another one tells that the file was written anew.
        start: where the tensor begins after the header, in bytes.
        size: of the tensor, in bytes.
        shape: channels, height, width; or tokens, width.
        dtype: the format's own name for it; a key of `DTYPES`.
        scaling: the network sees (x - shift) * scaling; 1 for text.
        shift: see there; 0 for text.
        pixels: how many pixels wide the picture was; None where the file does not say.
    """

    path: str
    header: int
    check: int
    start: int
    size: int
    shape: tuple[int, ...]
    dtype: str
    scaling: float
    shift: float
    pixels: float | None

    @property
    def scale(self) -> Scale:
        """How its values relate to the network's and to pixels."""
        pixels = self.pixels / self.shape[-1] if self.pixels else None
        return Scale(self.scaling, self.shift, pixels)

    def is_like(self, other: Stored) -> bool:
        """Whether another state of the file takes the same place in a batch."""
        return (self.shape, self.dtype, self.scaling, self.shift) == (
            other.shape,
            other.dtype,
            other.scaling,
            other.shift,
        )


class Scale(NamedTuple):
    """How cached latents relate to the network's, (x - shift) * scaling, and to pixels.

    Attributes:
        pixels: how many pixels wide one latent is; None where the file does not say.
    """

    scaling: float
    shift: float
    pixels: float | None


def _damaged(path: str, error: Exception) -> CacheError:
    if isinstance(error, FileNotFoundError):
        return CacheError(
            "this cache file is missing",
            where=path,
            mend="give the build's command again, which encodes it anew",
        )
    return CacheError(f"this cache file cannot be read ({error})", where=path, mend=MEND)


def _number(metadata: dict[str, str], key: str, path: str, default: str | None = None) -> float:
    try:
        return float(metadata.get(key, default) or "")
    except (ValueError, TypeError):
        raise CacheError(f"has no number `{key}` in its header", where=path, mend=MEND) from None


def inspect(path: str | os.PathLike[str], name: str) -> Stored:
    """Read the header of a cache file and find a tensor in it.

    Args:
        path: of the file.
        name: of the tensor, `LATENTS` or `HIDDEN_STATE`.

    Raises:
        CacheError: the file is missing or damaged, or has no such tensor.
    """
    path = os.fspath(path)
    try:
        head = read_head(path)
        if name not in head.entries:
            raise ValueError(f"has no tensor `{name}`")
        dtype, shape, start, stop = head.tensors[name]
    except (OSError, ValueError) as error:
        raise _damaged(path, error) from None
    if len(shape) != _DIMENSIONS[name] or 0 in shape:
        raise CacheError(f"`{name}` has the shape {list(shape)}", where=path, mend=MEND)
    if dtype not in DTYPES:
        raise CacheError(f"`{name}` is stored as {dtype}", where=path, mend=MEND)
    values = torch.Size(shape).numel()
    if start < 0 or stop - start != values * DTYPES[dtype].itemsize:
        raise _damaged(path, ValueError("has a damaged header"))
    metadata = head.metadata
    is_latents = name == LATENTS
    if is_latents and {"pixel_width", "pixel_height"} <= metadata.keys():
        width, height = (_number(metadata, f"pixel_{side}", path) for side in ("width", "height"))
        if width * shape[1] != height * shape[2]:
            raise CacheError(
                f"`{name}` has the shape {list(shape)}, which does not fit its picture of "
                f"{width:g} x {height:g} pixels",
                where=path,
                mend=MEND,
            )
    return Stored(
        path=path,
        header=len(head.data),
        check=zlib.crc32(head.data),
        start=start,
        size=stop - start,
        shape=shape,
        dtype=sys.intern(dtype),
        scaling=_number(metadata, "scaling_factor", path) if is_latents else 1.0,
        shift=_number(metadata, "shift_factor", path, "0.0") if is_latents else 0.0,
        pixels=_number(metadata, "pixel_width", path) if "pixel_width" in metadata else None,
    )


def inspect_all(paths: Iterable[str], name: str) -> dict[str, Stored]:
    """Read the headers of many cache files, each once, several at a time.

    Returns:
        What `inspect` finds of each path.

    Raises:
        CacheError: the first of them that is missing or damaged.
    """
    distinct = list(dict.fromkeys(paths))
    chunks = [distinct[start : start + _CHUNK] for start in range(0, len(distinct), _CHUNK)]
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="headers") as pool:
        try:
            found = pool.map(lambda chunk: [inspect(path, name) for path in chunk], chunks)
            return {each.path: each for chunk in found for each in chunk}
        finally:
            pool.shutdown(cancel_futures=True)


def read_tensor(path: Path, name: str) -> torch.Tensor:
    """Return a tensor of a cache file as it is stored.

    Raises:
        CacheError: the file is missing or damaged.
    """
    try:
        with safe_open(path, framework="pt") as file:
            tensor: torch.Tensor = file.get_tensor(name)
    except (OSError, SafetensorError) as error:
        raise _damaged(os.fspath(path), error) from None
    return tensor


def read_text(path: Path) -> torch.Tensor:
    """Return the embedding [tokens, width] of the first text encoder, float32.

    Raises:
        CacheError: it is missing or damaged, or holds values that are no numbers.
    """
    text = read_tensor(path, HIDDEN_STATE).float()
    if not torch.isfinite(text).all():
        raise CacheError("holds NaN or infinite values", where=path, mend=MEND)
    return text


def read_scale(path: Path) -> Scale:
    """Read how the latents of a cache file relate to the network's and to pixels.

    Raises:
        CacheError: it is missing or damaged.
    """
    return inspect(path, LATENTS).scale
