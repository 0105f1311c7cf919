"""Batches of examples, padded where embeddings differ in length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch


class Batch(NamedTuple):
    """Examples of one shape.

    Attributes:
        latents: [batch, channels, height, width], or [batch, channels, frames, height, width];
            float32, as the network sees them.
        text: [batch, tokens, width], in the caches' number format, float32 where they differ;
            shorter embeddings end in zeros.
        mask: [batch, tokens], True where a token is; None where all have equal length.
        indices: of the examples.
        more: further tensors [batch, ...] by name, in the caches' number format.
    """

    latents: torch.Tensor
    text: torch.Tensor
    mask: torch.Tensor | None
    indices: Sequence[int] = ()
    more: Mapping[str, torch.Tensor] = {}


def copied(
    tensor: torch.Tensor, device: torch.device, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Copy a tensor to a device; the CPU does not wait for it where it lies in pinned memory.

    The dtype is changed on the device: changed before, the tensor would no longer be pinned.
    """
    there = tensor.to(device, non_blocking=device.type != "mps")
    return there if dtype is None else there.to(dtype)


def pad(texts: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Stack embeddings [tokens, width] of different lengths, with zeros at the ends.

    Returns:
        [batch, most tokens, width], and `mask_of` their lengths.
    """
    padded = torch.nn.utils.rnn.pad_sequence(list(texts), batch_first=True)
    return padded, mask_of([len(text) for text in texts])


def mask_of(lengths: Sequence[int]) -> torch.Tensor | None:
    """Return the mask [batch, longest] of embeddings; None where all have equal length."""
    longest = max(lengths)
    if min(lengths) == longest:
        return None
    return torch.arange(longest)[None, :] < torch.tensor(lengths)[:, None]
