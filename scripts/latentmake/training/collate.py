"""Batches of the clip datasets, for a DataLoader's `collate_fn`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from latentmake.models.files import T5_LENGTH


class _Batch(dict[str, Any]):
    """A batch, where `frames` is another name of `pixel_values`, which is copied only once."""

    def __missing__(self, key: str) -> Any:
        if key == "frames" and "pixel_values" in self:
            return self["pixel_values"]
        raise KeyError(key)


def collate_fn(items: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Make a batch of items of one shape, of a ClipDataset or a CachedClipDataset.

    Embeddings are padded with zeros to 512 tokens, as Wan's network was trained and as diffusers'
    WanPipeline does; to the longest where one is longer.

    Returns:
        Every tensor of the items, stacked: `pixel_values` [B, F, 3, H, W], which `batch["frames"]`
        gives too, or `latents` [B, 16, f, h, w], `text` [B, 512, D] and `mask` [B, 512], true where
        a caption has tokens; `prompts` and `rows`, lists of B.

    Raises:
        ValueError: the shapes of items differ, which are named.
    """
    batch = _Batch(prompts=[item["prompt"] for item in items])
    if "row" in items[0]:
        batch["rows"] = [item["row"] for item in items]
    for name, value in items[0].items():
        if not isinstance(value, torch.Tensor):
            continue
        tensors = [item[name] for item in items]
        if name == "text":
            lengths = torch.tensor([len(tensor) for tensor in tensors])
            longest = max(T5_LENGTH, int(lengths.max()))
            batch["text"] = torch.stack([_padded(tensor, longest) for tensor in tensors])
            batch["mask"] = torch.arange(longest) < lengths[:, None]
            continue
        shapes = {tuple(tensor.shape) for tensor in tensors}
        if len(shapes) > 1:
            raise ValueError(
                f"{name} of one batch have the shapes {sorted(shapes)}: use batch_size=1, or a "
                "batch sampler that groups items of one shape"
            )
        batch[name] = torch.stack(tensors)
    return batch


def _padded(tokens: torch.Tensor, length: int) -> torch.Tensor:
    rows = tokens.new_zeros(length, *tokens.shape[1:])
    rows[: len(tokens)] = tokens
    return rows
