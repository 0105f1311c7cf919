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

    def pinned(self) -> Batch:
        """Return a copy in pinned memory, from which a GPU takes it faster."""
        mask = None if self.mask is None else self.mask.pin_memory()
        more = {name: each.pin_memory() for name, each in self.more.items()}
        latents, text = self.latents.pin_memory(), self.text.pin_memory()
        return Batch(latents, text, mask, self.indices, more)


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
        [batch, most tokens, width], and their mask [batch, most tokens]; None where all have equal
        length.
    """
    padded = torch.nn.utils.rnn.pad_sequence(list(texts), batch_first=True)
    lengths = [len(text) for text in texts]
    if len(set(lengths)) == 1:
        return padded, None
    return padded, torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
