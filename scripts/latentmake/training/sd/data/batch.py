"""The layout of a batch in memory: the bytes of its files lie there as the network takes them.

Files are read straight to their place, so that nothing is copied afterwards. All of this is numpy
and not torch where it works on values: it may run beside the training, in a thread, and there torch
would start threads of its own that take the training's processors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from latentmake.errors import CacheError
from latentmake.training.sd.data.headers import DTYPES, Stored
from latentmake.training.sd.data.reader import Part

__all__ = ["Batch", "Plan", "pad", "plan", "unfold"]

_ALIGNED = 64  # bytes: where tensors of several number formats may begin


class Batch(NamedTuple):
    """Examples of one shape.

    Attributes:
        latents: [batch, channels, height, width], float32, as the network sees them.
        text: [batch, tokens, width], in the number format of the caches, float32 where they
            differ; shorter embeddings end in zeros.
        mask: [batch, tokens], True where a token is; None where all have equal length.
        indices: which examples these are.
    """

    latents: torch.Tensor
    text: torch.Tensor
    mask: torch.Tensor | None
    indices: Sequence[int] = ()


class Plan(NamedTuple):
    """Where the files of a batch go.

    Attributes:
        indices: which examples they are.
        latents: of each example.
        texts: of each example.
        parts: of latents, then of texts; places count from the start of the batch.
        size: of the batch in memory, in bytes.
    """

    indices: Sequence[int]
    latents: list[Stored]
    texts: list[Stored]
    parts: list[Part]
    size: int


def pad(texts: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Stack embeddings of different lengths.

    Args:
        texts: each [tokens, width].

    Returns:
        [batch, most tokens, width] with zeros at the ends, and the mask [batch, most tokens] that
        is True where a token is; no mask where all have equal length.
    """
    mask = _mask([len(text) for text in texts])
    if mask is None:
        return torch.stack(list(texts)), None
    return torch.nn.utils.rnn.pad_sequence(list(texts), batch_first=True), mask


def _mask(lengths: list[int]) -> torch.Tensor | None:
    longest = max(lengths)
    if min(lengths) == longest:
        return None
    return torch.arange(longest)[None, :] < torch.tensor(lengths)[:, None]


def _part(stored: Stored, place: int, zeros: int = 0) -> Part:
    return (
        stored.path,
        stored.header,
        stored.check,
        stored.start,
        stored.size,
        place,
        zeros,
    )


def _aligned(place: int) -> int:
    return -(-place // _ALIGNED) * _ALIGNED


def plan(indices: Sequence[int], latents: list[Stored], texts: list[Stored]) -> Plan:
    """Lay out a batch: latents one after another, then embeddings, as long as the longest each.

    Where number formats differ within the batch, each tensor has a place of its own for it.

    Raises:
        CacheError: the latents are not of one shape.
    """
    first = latents[0]
    for other in latents:
        if other.shape != first.shape:
            raise CacheError(
                f"its latents have the shape {list(other.shape)}, but those of {first.path} in the "
                f"same batch {list(first.shape)}",
                where=other.path,
                mend="make batches of one shape",
            )
    parts: list[Part] = []
    place = 0
    step = _ALIGNED if len({each.dtype for each in latents}) > 1 else 1
    for each in latents:
        parts.append(_part(each, place))
        place = -(-(place + each.size) // step) * step
    place = _aligned(place)
    if len({each.dtype for each in texts}) > 1:
        for each in texts:
            parts.append(_part(each, place))
            place = _aligned(place + each.size)
    else:
        longest = max(each.size for each in texts)
        for each in texts:
            parts.append(_part(each, place, longest - each.size))
            place += longest
    return Plan(indices, latents, texts, parts, place)


def _values(raw: npt.NDArray[np.uint8], dtype: str) -> npt.NDArray[Any]:
    """Return bytes as numbers; bfloat16, which numpy does not know, as the float32 it begins."""
    if dtype == "BF16":
        wide = raw.view(np.uint16).astype(np.uint32)
        return np.left_shift(wide, 16, out=wide).view(np.float32)
    return raw.view({"F64": np.float64, "F32": np.float32, "F16": np.float16}[dtype])


def _factor(values: list[float]) -> float | npt.NDArray[np.float32]:
    if values.count(values[0]) == len(values):
        return values[0]
    return np.array(values, np.float32)[:, None, None, None]


def _latents(memory: torch.Tensor, made: Plan) -> torch.Tensor:
    stored, shape, dtype = made.latents, made.latents[0].shape, made.latents[0].dtype
    count = len(stored)
    whole = memory[: count * stored[0].size]
    if any(each.dtype != dtype for each in stored):
        result = torch.empty(count, *shape)
        for row, each, part in zip(result.numpy(), stored, made.parts, strict=False):
            found = memory[part[5] : part[5] + each.size].numpy()
            row[:] = _values(found, each.dtype).reshape(shape)
    elif dtype == "F32":
        result = whole.view(torch.float32).view(count, *shape)
    else:
        values = _values(whole.numpy(), dtype).astype(np.float32, copy=False)
        result = torch.from_numpy(values).view(count, *shape)
    values = result.numpy()  # the same memory
    shift = _factor([each.shift for each in stored])
    with np.errstate(over="ignore", invalid="ignore"):  # the loss will tell
        if not isinstance(shift, float) or shift:
            np.subtract(values, shift, out=values)
        np.multiply(values, _factor([each.scaling for each in stored]), out=values)
    return result


def _texts(memory: torch.Tensor, made: Plan) -> torch.Tensor:
    stored, parts = made.texts, made.parts[len(made.latents) :]
    longest, width = max(each.shape[0] for each in stored), stored[0].shape[1]
    dtypes = {each.dtype for each in stored}
    if len(dtypes) == 1:
        whole = memory[parts[0][5] : made.size].view(DTYPES[dtypes.pop()])
        return whole.view(len(stored), longest, width)
    result = torch.zeros(len(stored), longest, width)
    for row, each, part in zip(result, stored, parts, strict=True):
        found = memory[part[5] : part[5] + each.size].view(DTYPES[each.dtype])
        row[: each.shape[0]] = found.view(each.shape)
    return result


def unfold(memory: torch.Tensor, made: Plan) -> Batch:
    """Make a batch of the memory that its files were read to.

    Args:
        memory: bytes, laid out as `made` says; the batch goes on using them.
        made: the layout.
    """
    return Batch(
        _latents(memory, made),
        _texts(memory, made),
        _mask([each.shape[0] for each in made.texts]),
        made.indices,
    )
