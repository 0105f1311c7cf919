"""Accelerator setup, attention backend, determinism."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from accelerate.accelerator import Accelerator
from accelerate.utils import DistributedDataParallelKwargs
from torch.nn.attention import SDPBackend, sdpa_kernel

from latentmake.config import LoopTrainer
from latentmake.errors import TrainingError, first_line
from latentmake.training.loop.checks import refuse_sharded

__all__ = ["DTYPES", "attention", "make_accelerator", "reseed", "set_up"]

DTYPES = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def make_accelerator(settings: LoopTrainer, kind: str, *, several: bool = False) -> Any:
    """Return the Accelerator of this process, as `accelerate launch` has set it up.

    Args:
        settings: of the trainer.
        kind: of the trainer, for messages.
        several: whether a step may leave some trained weights without gradients.

    Raises:
        TrainingError: the machine cannot compute in this precision, or accelerate shards the model.
    """
    handlers = [DistributedDataParallelKwargs(find_unused_parameters=True)] if several else None
    try:
        accelerator: Any = Accelerator(
            mixed_precision=settings.mixed_precision, kwargs_handlers=handlers
        )
    except ValueError as error:
        raise TrainingError(
            f"this machine does not compute in {settings.mixed_precision} ({error})",
            where="trainer.mixed_precision",
            hint="set it to `no`",
        ) from None
    refuse_sharded(str(accelerator.distributed_type.value), kind)
    return accelerator


def set_up(network: Any, settings: LoopTrainer) -> None:
    """Set the kernels of a network, by the settings `attention` and `deterministic`."""
    if settings.deterministic:
        # cuBLAS repeats itself only with a workspace of a fixed size.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
    if settings.attention == "xformers":
        try:
            network.enable_xformers_memory_efficient_attention()
        except (ImportError, ValueError, NotImplementedError) as error:
            raise TrainingError(
                f"xformers cannot be used here ({first_line(error)})",
                where="trainer.attention",
                hint="pip install xformers on a machine with a GPU, or set it to `sdpa`",
            ) from None


def attention(settings: LoopTrainer) -> AbstractContextManager[None]:
    """Return the context of the setting `attention`.

    `flash` puts torch's flash kernel first; a masked batch, for which it has none, goes to the next
    (https://docs.pytorch.org/docs/stable/generated/torch.nn.attention.sdpa_kernel.html).
    """
    if settings.attention != "flash":
        return nullcontext()
    order = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    context: AbstractContextManager[None] = sdpa_kernel(order, set_priority=True)
    return context


def reseed(seed: int, device: torch.device) -> None:
    """Set the generators of the CPU and of one device, and no others.

    `torch.manual_seed` asks for every kind of device there is, which takes as long as a layer.
    """
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)
    elif device.type != "cpu":
        torch.manual_seed(seed)
