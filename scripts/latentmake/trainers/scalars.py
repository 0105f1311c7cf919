"""What TensorBoard shows of a training, step by step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.utils.tensorboard import SummaryWriter

__all__ = ["Scalars", "query_key_gradients"]

_QUERIES_AND_KEYS = (".to_q.", ".to_k.")


def query_key_gradients(parameters: Iterable[tuple[str, torch.nn.Parameter]]) -> torch.Tensor:
    """Return the sum over all weights of queries and keys of their mean absolute gradient.

    It tells how strongly attention is still being rearranged (ai-training's `qk_grads_av`). Those
    of a LoRA count like any other; without gradients it is 0.

    Args:
        parameters: (name, parameter) of the network.

    Returns:
        A scalar, float32, on the gradients' device.
    """
    gradients = [
        each.grad
        for name, each in parameters
        if each.grad is not None and any(part in f".{name}" for part in _QUERIES_AND_KEYS)
    ]
    if not gradients:
        return torch.zeros(())
    # One kernel for all of them, not one a layer.
    sums = torch._foreach_norm(gradients, 1, dtype=torch.float32)
    return torch.stack(
        [total / each.numel() for total, each in zip(sums, gradients, strict=True)]
    ).sum()


class Scalars:
    """The event file of a training; with None in place of a folder, nothing is written.

    Args:
        folder: of TensorBoard's files.
        first: the step to come; what a killed training wrote from there on is drawn anew.
    """

    def __init__(self, folder: Path | None, first: int) -> None:
        self._writer: Any = None
        if folder is not None:
            self._writer = SummaryWriter(str(folder), purge_step=first)

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Write the values of a step."""
        if self._writer is not None:
            for name, value in values.items():
                self._writer.add_scalar(name, value, step)

    def flush(self) -> None:
        """Bring to the disk what was written."""
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        """End the file."""
        if self._writer is not None:
            self._writer.close()
