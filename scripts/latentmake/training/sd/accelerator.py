"""How a training computes: accelerate's devices, attention, and kernels that repeat."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from accelerate.accelerator import Accelerator
from torch.nn.attention import SDPBackend, sdpa_kernel

from latentmake.config import SdTrainer
from latentmake.errors import TrainingError, first_line

__all__ = ["DTYPES", "attention", "make_accelerator", "reseed", "set_up", "uses_deepspeed"]

DTYPES = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_KINDS = ("NO", "MULTI_GPU", "MULTI_CPU", "DEEPSPEED")
_ELEMENTWISE = ("adamw", "lion")  # they look at each weight by itself
_WHERE = "trainer.accelerate_config"


def make_accelerator(settings: SdTrainer) -> Any:
    """Return the Accelerator of this process, as `accelerate launch` has set it up.

    Raises:
        TrainingError: the machine cannot compute in this precision, or not in this way.
    """
    # Under DeepSpeed the weights that are trained stay float32, and autocast does the rest.
    deepspeed = os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true"
    precision = "no" if deepspeed else settings.mixed_precision
    try:
        accelerator: Any = Accelerator(mixed_precision=precision)
    except ImportError as error:
        if not deepspeed:
            raise
        raise TrainingError(
            f"DeepSpeed cannot be used ({first_line(error)})",
            where=_WHERE,
            mend="pip install deepspeed, or choose no DeepSpeed in `accelerate config`",
        ) from None
    except ValueError as error:
        if deepspeed:
            raise TrainingError(
                f"this configuration of DeepSpeed does not fit ({error})",
                where=_WHERE,
                mend="correct it",
            ) from None
        raise TrainingError(
            f"this machine does not compute in {precision} ({error})",
            where="trainer.mixed_precision",
            mend="set it to `no`",
        ) from None
    kind = str(accelerator.distributed_type.value)
    if kind not in _KINDS:
        raise TrainingError(
            f"the sd trainer does not work under {kind}",
            where=_WHERE,
            mend="choose one machine, plain multi-GPU or DeepSpeed in `accelerate config`",
        )
    if uses_deepspeed(accelerator):
        _set_up_deepspeed(accelerator, settings)
    return accelerator


def uses_deepspeed(accelerator: Any) -> bool:
    """Whether DeepSpeed makes the steps."""
    return str(accelerator.distributed_type.value) == "DEEPSPEED"


def _set_up_deepspeed(accelerator: Any, settings: SdTrainer) -> None:
    """Give DeepSpeed what our settings say, and refuse what would change the result."""
    config: dict[str, Any] = accelerator.state.deepspeed_plugin.deepspeed_config
    zero: dict[str, Any] = config.get("zero_optimization", {})
    if (stage := zero.get("stage", 0)) not in (1, 2):
        raise TrainingError(
            f"the sd trainer does not work under DeepSpeed's ZeRO stage {stage}",
            where=_WHERE,
            mend="set `zero_stage` to 1 or 2",
        )
    if zero.get("offload_optimizer", {}).get("device", "none") != "none":
        raise TrainingError(
            "the sd trainer leaves the optimizer where the network is",
            where=_WHERE,
            mend="set `offload_optimizer_device` to none",
        )
    for key in ("optimizer", "scheduler"):
        if key in config:
            raise TrainingError(
                f"the {key} is the trainer's, not DeepSpeed's",
                where=_WHERE,
                mend=f"leave `{key}` out of DeepSpeed's configuration",
            )
    if settings.mixed_precision == "fp16":
        raise TrainingError(
            "fp16 does not go together with DeepSpeed here",
            where="trainer.mixed_precision",
            mend="set it to `bf16` or `no`",
        )
    if settings.optimizer not in _ELEMENTWISE:
        raise TrainingError(
            f"{settings.optimizer} has to see all weights, of which ZeRO gives it a part",
            where="trainer.optimizer",
            mend=f"choose {' or '.join(_ELEMENTWISE)}, or no DeepSpeed in `accelerate config`",
        )
    accelerator.gradient_accumulation_steps = settings.gradient_accumulation_steps
    config.update(
        train_micro_batch_size_per_gpu=settings.train_batch_size,
        train_batch_size="auto",
        gradient_accumulation_steps=settings.gradient_accumulation_steps,
        gradient_clipping=settings.max_grad_norm or 0.0,
        fp16={"enabled": False},
        bf16={"enabled": False},
        # Inside its engine, DeepSpeed puts its own autocast in the place of ours. Gradients of no
        # module go between processes in fewer bits.
        torch_autocast={
            "enabled": settings.mixed_precision == "bf16",
            "dtype": "bfloat16",
            "lower_precision_safe_modules": [],
        },
    )


def set_up(unet: Any, settings: SdTrainer) -> None:
    """Choose the kernels of a UNet, by the settings `attention` and `deterministic`.

    Raises:
        TrainingError: xformers is not installed, or has no kernel for this machine.
    """
    if settings.deterministic:
        # Where cuBLAS is asked to repeat itself, it wants a workspace of a fixed size.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
    if settings.attention == "xformers":
        try:
            unet.enable_xformers_memory_efficient_attention()
        except (ImportError, ValueError, NotImplementedError) as error:
            raise TrainingError(
                f"xformers cannot be used here ({first_line(error)})",
                where="trainer.attention",
                mend="pip install xformers on a machine with a GPU, or set it to `sdpa`",
            ) from None


def attention(settings: SdTrainer) -> AbstractContextManager[None]:
    """Return the context in which a UNet attends.

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

    `torch.manual_seed` looks for every kind of device there is, which takes as long as a layer.
    """
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)
    elif device.type != "cpu":
        torch.manual_seed(seed)
