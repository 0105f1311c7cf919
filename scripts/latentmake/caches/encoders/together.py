"""Captions that are encoded together, and their padding.

- CLIP: to its chunks of 77 tokens each. It has no mask, and a UNet attends to the padding, too.
- T5 and umT5 with a mask: to the longest of a batch. Padding is hidden from the tokens and is no
  part of the cache (musubi-tuner cuts it off: `T5EncoderModel.__call__` of wan/modules/t5.py).
- T5 of sd-scripts' layout: to 512 tokens, with or without a mask. The cache holds the padding.

Hidden padding adds zeros to sums. That changes their order, and with it the last bits: see
`TOLERANCE`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from transformers import PreTrainedModel

from latentmake.caches.encoders.transfer import upload

Results = Callable[[], list[dict[str, torch.Tensor]]]
"""Waits for the device; tensors by name, of each caption, on the CPU."""

TOLERANCE: dict[torch.dtype, float] = {
    torch.float32: 1e-5,
    torch.bfloat16: 3e-2,
    torch.float16: 4e-3,
}
"""Largest difference of a result in a batch from the result alone, by the dtype that is computed
in, as a share of the largest value of the result: for each encoder of pixels and captions."""


def padded(
    rows: Sequence[Sequence[int]], length: int, padding: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids [N, length] of captions' tokens, and 1 for tokens and 0 for padding; int64."""
    ids = torch.tensor([[*row, *[padding] * (length - len(row))] for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (length - len(row)) for row in rows])
    return ids, mask


def hiding(mask: torch.Tensor, network: PreTrainedModel) -> torch.Tensor | None:
    """Return the argument `attention_mask` of a T5 or umT5, for a mask of `padded`, on its device.

    None where nothing is padded. transformers would look at a mask [N, T] on the device for that,
    and wait until the work before it is done (`_ignore_bidirectional_mask_sdpa` of masking_utils).
    A mask of four dimensions it takes as it is.
    """
    if bool(mask.all()):
        return None
    if network.config._attn_implementation != "sdpa":
        return upload(mask, network.device)
    return upload(mask.bool()[:, None, None], network.device)
