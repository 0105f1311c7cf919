"""Scalars of a training for TensorBoard, step by step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from tensorboard.compat.proto.summary_pb2 import Summary
from torch.utils.tensorboard import SummaryWriter

_QUERIES_AND_KEYS = (".to_q.", ".to_k.")


def queries_and_keys(
    parameters: Iterable[tuple[str, torch.nn.Parameter]],
) -> list[torch.nn.Parameter]:
    """Return the trained weights of queries and keys, of a network's (name, parameter)."""
    return [
        each
        for name, each in parameters
        if each.requires_grad and any(part in f".{name}" for part in _QUERIES_AND_KEYS)
    ]


def query_key_gradients(parameters: Iterable[torch.nn.Parameter]) -> torch.Tensor:
    """Return the sum over all weights of queries and keys of their mean absolute gradient.

    It tells how strongly attention is still being rearranged (ai-training's `qk_grads_av`). Those
    of a LoRA count like any other; without gradients it is 0.

    Args:
        parameters: of `queries_and_keys`.

    Returns:
        A scalar, float32, on the gradients' device.
    """
    gradients = [each.grad for each in parameters if each.grad is not None]
    if not gradients:
        return torch.zeros(())
    # One kernel for all of them, not one a layer.
    sums = torch._foreach_norm(gradients, 1, dtype=torch.float32)
    means = [total / each.numel() for total, each in zip(sums, gradients, strict=True)]
    return torch.stack(means).sum()


def add_scalars(writer: SummaryWriter, step: int, values: Mapping[str, float]) -> None:
    """Write the scalars of a step as one event: one each would cost as much as a small step."""
    summary = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
    file: Any = writer.file_writer
    file.add_summary(Summary(value=summary), step)
