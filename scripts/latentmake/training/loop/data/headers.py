"""Tensors in cache files: place, shape and scale by the header, and the read of their bytes."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from math import prod
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from latentmake.errors import CacheError
from latentmake.files.cachefile import corruption_of
from latentmake.files.safetensors import DTYPES, Head, parse_head, read_head

HINT = "delete it and run the build's command again, which encodes it anew"

_DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, dtype.name) for name, dtype in DTYPES.items() if dtype.exponent
}
_THREADS = 8  # that read headers: a disk or a network answers several at once
_CHUNK = 256  # files a thread takes at a time


class Sought(NamedTuple):
    """A tensor to find in cache files.

    Attributes:
        name: of the tensor; where there is a `pattern`, the beginning of its name, for messages.
        dimensions: number of its sides.
        scaled: whether the header has the scale of latents.
        pattern: regular expression that its name fits, where that contains shape or dtype.
    """

    name: str
    dimensions: int
    scaled: bool = False
    pattern: str = ""

    def find(self, names: Collection[str]) -> str | None:
        """Return which of the names in a file is meant; None where there is none."""
        if not self.pattern:
            return self.name if self.name in names else None
        return next((name for name in names if re.fullmatch(self.pattern, name)), None)


class Stored(NamedTuple):
    """A tensor in a cache file.

    Attributes:
        path: of the file.
        sought: how the tensor is found in it.
        shape: channels, (frames,) height, width; or tokens, width.
        dtype: number format in the file.
        scaling: the network sees (x - shift) * scaling; 1 for text.
        shift: see there; 0 for text.
        pixels: image pixels per column of the latents; None where the file does not say.
    """

    path: str
    sought: Sought
    shape: tuple[int, ...]
    dtype: torch.dtype
    scaling: float
    shift: float
    pixels: float | None

    @property
    def size(self) -> int:
        """Bytes of the tensor."""
        return prod(self.shape) * self.dtype.itemsize

    def read(self) -> torch.Tensor:
        """Return the tensor as it is stored.

        A file written anew since its header was read has to have the same shape and scale.

        Raises:
            CacheError: the file is missing or damaged, or has another shape or scale now.
        """
        try:
            data = Path(self.path).read_bytes()
            now, start = _find(self.path, self.sought, parse_head(data))
        except (OSError, ValueError) as error:
            raise _damaged(self.path, error) from None
        if now._replace(pixels=self.pixels) != self:
            raise CacheError(
                "has another shape or scale than when the training began",
                where=self.path,
                hint="run the build's command again",
            )
        # Copied, for the place in the file need not be a multiple of the number's size.
        values = np.frombuffer(data, np.uint8, self.size, start)
        return torch.tensor(values).view(self.dtype).view(self.shape)


def _damaged(path: str, error: object) -> CacheError:
    if isinstance(error, FileNotFoundError):
        return CacheError(
            "this cache file is missing",
            where=path,
            hint="run the build's command again, which encodes it anew",
        )
    return CacheError(f"this cache file cannot be read ({error})", where=path, hint=HINT)


def _scale(
    path: str, name: str, metadata: dict[str, str], shape: tuple[int, ...]
) -> tuple[float, float, float | None]:
    """Return scaling, shift and pixels of latents, see `Stored`."""

    def number(key: str, default: str = "") -> float:
        try:
            return float(metadata.get(key, default))
        except (ValueError, TypeError):
            said = f"has no number `{key}` in its header"
            raise CacheError(said, where=path, hint=HINT) from None

    pixels = None
    if "pixel_width" in metadata:
        width = number("pixel_width")
        pixels = width / shape[2] or None
        if "pixel_height" in metadata and width * shape[1] != number("pixel_height") * shape[2]:
            raise CacheError(
                f"`{name}` has the shape {list(shape)}, which does not fit its image of "
                f"{width:g} x {number('pixel_height'):g} pixels",
                where=path,
                hint=HINT,
            )
    return number("scaling_factor"), number("shift_factor", "0.0"), pixels


def inspect(path: str | os.PathLike[str], sought: Sought) -> Stored:
    """Read the header of a cache file and find a tensor in it.

    Raises:
        CacheError: the file is missing or damaged, or has no such tensor.
    """
    path = os.fspath(path)
    try:
        return _find(path, sought, read_head(path))[0]
    except (OSError, ValueError) as error:
        raise _damaged(path, error) from None


def _find(path: str, sought: Sought, head: Head) -> tuple[Stored, int]:
    """Return a tensor and its place in the file, in bytes."""
    name = sought.find(head.entries)
    if name is None:
        raise ValueError(f"has no tensor `{sought.name}`")
    stored_as, shape, start, stop = head.tensors[name]
    if len(shape) != sought.dimensions or 0 in shape:
        raise CacheError(f"`{name}` has the shape {list(shape)}", where=path, hint=HINT)
    if stored_as not in _DTYPES:
        raise CacheError(f"`{name}` is stored as {stored_as}", where=path, hint=HINT)
    scale = _scale(path, name, head.metadata, shape) if sought.scaled else (1.0, 0.0, None)
    found = Stored(path, sought, shape, _DTYPES[stored_as], *scale)
    if start < 0 or stop - start != found.size:
        raise ValueError("has a damaged header")
    return found, len(head.data) + start


def inspect_all(paths: Iterable[str], sought: Sought) -> dict[str, Stored]:
    """Read the headers of many cache files, each once, several at a time.

    Raises:
        CacheError: the first of them that is missing or damaged.
    """
    distinct = list(dict.fromkeys(paths))
    chunks = [distinct[start : start + _CHUNK] for start in range(0, len(distinct), _CHUNK)]
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="headers") as pool:
        try:
            found = pool.map(lambda chunk: [inspect(path, sought) for path in chunk], chunks)
            return {each.path: each for chunk in found for each in chunk}
        finally:
            pool.shutdown(cancel_futures=True)


def check_bytes(path: str | os.PathLike[str]) -> None:
    """Read a cache file, and compare its bytes with the checksums in its header, if it has any.

    Raises:
        CacheError: it is missing, or other bytes than were written.
    """
    try:
        damage = corruption_of(path)
    except OSError as error:
        raise _damaged(os.fspath(path), error) from None
    if damage is not None:
        raise CacheError(f"this cache file is damaged: {damage}", where=path, hint=HINT)


def read_text(path: str, sought: Sought) -> torch.Tensor:
    """Return the embedding [tokens, width] in a cache file of text, float32.

    Raises:
        CacheError: it is missing or damaged, or holds NaN or infinite values.
    """
    check_bytes(path)
    text = inspect(path, sought).read().float()
    if not torch.isfinite(text).all():
        raise CacheError("holds NaN or infinite values", where=path, hint=HINT)
    return text
