"""Captions that are encoded together, and their padding.

- CLIP: to its chunks of 77 tokens each. It has no mask, and a UNet attends to the padding, too.
- T5 and umT5 with a mask: to the longest of a batch. Padding is hidden from the tokens and is no
  part of the cache (musubi-tuner cuts it off: `T5EncoderModel.__call__` of wan/modules/t5.py).
- T5 of sd-scripts' layout: to 512 tokens, with or without a mask. The cache holds the padding.

Hidden padding adds zeros to sums. That changes their order, and with it the last bits: see
`TOLERANCE`. So on a CPU only captions of equally many tokens are encoded together, and only where a
row of a matrix product does not depend on the number of rows (`BitEqual`).
"""

from __future__ import annotations

import threading
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

_ROWS = 256  # of a matrix: with more of them a CPU's core gains little
_TOGETHER = 4


def alike_on_cpu(lengths: Sequence[int]) -> int:
    """Return how many captions of so many tokens a CPU encodes at once, if bits stay equal.

    `lengths` are the numbers of tokens in several encoders.
    """
    return max(1, min(_TOGETHER, _ROWS // min(lengths)))


def groups(lengths: Sequence[int], equal: BitEqual | None) -> list[list[int]]:
    """Return which captions of so many tokens are encoded at once: all, or see `BitEqual`."""
    if equal is None:
        return [list(range(len(lengths)))] if lengths else []
    by_length: dict[int, list[int]] = {}
    for index, length in enumerate(lengths):
        by_length.setdefault(length, []).append(index)
    found: list[list[int]] = []
    for length, indices in by_length.items():
        most = alike_on_cpu([length])
        for start in range(0, len(indices), most):
            some = indices[start : start + most]
            found += [some] if len(some) == 1 or equal(len(some), length) else [[i] for i in some]
    return found


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


class BitEqual:
    """Whether captions that a network encodes together come out as alone, to the last bit.

    All else of a text encoder works on each caption by itself, but a linear layer gets the tokens
    of all captions as rows of one matrix, and libraries choose by their number how to multiply.
    Which way is chosen depends on shapes alone, so it is tried once for each number of rows.

    Args:
        network: on a CPU.
        projection: of its output, if any.
    """

    def __init__(self, network: torch.nn.Module, projection: torch.nn.Module | None = None) -> None:
        linear: dict[tuple[int, ...], torch.nn.Module] = {}
        for module in (*network.modules(), *(projection.modules() if projection else ())):
            weight = getattr(module, "weight", None)
            weight = getattr(module, "packed", None) if weight is None else weight  # umT5's 8 bits
            if weight is not None and weight.dim() == 2:
                linear.setdefault(tuple(weight.shape), module)
        self._layers = [
            (shape[1], module)
            for shape, module in linear.items()
            if not isinstance(module, torch.nn.Embedding)
        ]
        self._dtype = next(network.parameters()).dtype
        self._lock = threading.Lock()
        self._found: dict[tuple[int, int], bool] = {}

    def __call__(self, count: int, length: int) -> bool:
        """Tell it for so many captions of so many tokens each."""
        with self._lock:
            if (count, length) not in self._found:
                self._found[count, length] = self._tried(count, length)
            return self._found[count, length]

    def _tried(self, count: int, length: int) -> bool:
        generator = torch.Generator().manual_seed(0)
        for width, layer in self._layers:
            values = torch.randn(count, length, width, generator=generator, dtype=self._dtype)
            together = layer(values)
            alone = [layer(each[None].clone()) for each in values]
            if not torch.equal(together, torch.cat(alone)):
                return False
        return True
