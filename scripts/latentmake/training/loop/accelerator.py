"""Accelerator setup, determinism."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any, TypeVar

import torch
from accelerate.accelerator import Accelerator
from accelerate.utils import (
    DistributedDataParallelKwargs,
    InitProcessGroupKwargs,
    is_bf16_available,
    parse_flag_from_env,
)

from latentmake.caches.encoders.device import pick_device
from latentmake.config.trainers import LoopTrainer
from latentmake.errors import TrainingError
from latentmake.training.loop.checks import refuse_sharded
from latentmake.training.loop.order import TrainingOrder

_Order = TypeVar("_Order", bound=TrainingOrder)

DTYPES = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

# The others wait while the first process draws samples, which may take hours: NCCL's own limit is
# ten minutes. `accelerate launch` ends all processes as soon as one dies.
_TIMEOUT = timedelta(days=7)


def decided(order: _Order) -> _Order:
    """Return an order in the precision of this machine, where `mixed_precision` is `auto`.

    Raises:
        DeviceError: torch does not see this machine's GPU.
    """
    if order.trainer.mixed_precision != "auto":
        return order
    uses_cpu = parse_flag_from_env("ACCELERATE_USE_CPU")
    device = "cpu" if uses_cpu else pick_device().type
    if device == "cpu":
        return order.in_precision("no")
    # Emulated by older GPUs, it is slower than float32.
    cuda = device == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    has_it = cuda or (device != "cuda" and is_bf16_available())
    return order.in_precision("bf16" if has_it else "fp16")


def make_accelerator(settings: LoopTrainer, kind: str, *, several: bool = False) -> Any:
    """Return the Accelerator of this process, as `accelerate launch` has set it up.

    Args:
        settings: of the trainer.
        kind: of the trainer, for messages.
        several: whether a step may leave some trained weights without gradients.

    Raises:
        DeviceError: torch does not see this machine's GPU.
        TrainingError: the machine cannot compute in this precision, or accelerate shards the model.
    """
    if not parse_flag_from_env("ACCELERATE_USE_CPU"):
        pick_device()  # accelerate would train on the CPU and say nothing
    handlers: list[Any] = [InitProcessGroupKwargs(timeout=_TIMEOUT)]
    if several:
        handlers.append(DistributedDataParallelKwargs(find_unused_parameters=True))
    try:
        accelerator: Any = Accelerator(
            mixed_precision=settings.mixed_precision, kwargs_handlers=handlers
        )
    except ValueError as error:
        raise TrainingError(
            f"this machine cannot compute in {settings.mixed_precision} ({error})",
            where="trainer.mixed_precision",
            hint=f"set it to `{'fp16' if settings.mixed_precision == 'bf16' else 'no'}`",
        ) from None
    refuse_sharded(str(accelerator.distributed_type.value), kind)
    return accelerator


def set_up(settings: LoopTrainer) -> None:
    """Set torch's kernels, by the setting `deterministic`."""
    if settings.deterministic:
        # cuBLAS repeats itself only with a workspace of a fixed size.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False


def reseed(seed: int, device: torch.device) -> None:
    """Set the generators of the CPU and of one device, and no others.

    `torch.manual_seed` asks for every kind of device there is, which takes as long as a layer.
    """
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)
    elif device.type != "cpu":
        torch.manual_seed(seed)
