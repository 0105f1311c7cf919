"""Device and dtype of encoders, and recovery from out-of-memory errors."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

__all__ = ["DTYPES", "compute_dtype", "pick_device", "within_memory"]

Given = ParamSpec("Given")
Result = TypeVar("Result")

# CUDA's allocator has an error class; those of Apple, the CPU, cuDNN and cuBLAS have messages only.
_OUT_OF_MEMORY = re.compile(
    "out of memory|can't allocate memory|not enough memory|Invalid buffer size|_STATUS_ALLOC_FAILED"
)

DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def pick_device() -> torch.device:
    """Return CUDA (or ROCm) where there is one, else Apple's, else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda")
    if torch.backends.mps.is_available():
        return torch.device("mps")
    return torch.device("cpu")


def compute_dtype(
    device: torch.device, name: str, say: Callable[[str], None], *, cpu_bfloat16: bool = False
) -> torch.dtype:
    """Return the dtype to compute in: that of the caches if the device has it, else float32.

    A CPU computes in float32, and the result is rounded once, when it is written: half precision is
    slow there as a rule, and loses accuracy. With `cpu_bfloat16` one that has instructions for
    bfloat16 computes in it.
    """
    dtype = DTYPES[name]
    if dtype == torch.float32:
        return dtype
    has_it = device.type != "cpu"
    if not has_it and cpu_bfloat16 and dtype == torch.bfloat16:
        found = torch.cpu.get_capabilities()
        has_it = bool(found.get("avx512_bf16") or found.get("amx_bf16"))
    if device.type == "cuda" and dtype == torch.bfloat16:
        has_it = torch.cuda.is_bf16_supported(including_emulation=False)
    if not has_it:
        say(f"{device.type} computes in float32; the caches are stored as {name}")
        return torch.float32
    return dtype


def within_memory(
    work: Callable[Given, Result], *args: Given.args, **options: Given.kwargs
) -> Result | None:
    """Do some work, or return None if the memory of the GPU or the machine does not suffice.

    By then the error is gone, and with its traceback the activations that filled the memory: inside
    an exception handler they would still be alive.
    """
    try:
        return work(*args, **options)
    except (RuntimeError, MemoryError) as error:
        if not _is_out_of_memory(error):
            raise
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    elif torch.backends.mps.is_available():
        torch.mps.empty_cache()
    return None


def _is_out_of_memory(error: BaseException) -> bool:
    known = isinstance(error, torch.OutOfMemoryError | MemoryError)
    return known or _OUT_OF_MEMORY.search(str(error)) is not None
