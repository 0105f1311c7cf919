"""Which device encodes, and in which number format it computes."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

__all__ = ["DTYPES", "compute_dtype", "pick_device", "within_memory"]

Given = ParamSpec("Given")
Result = TypeVar("Result")

# CUDA's allocator has an error of its own; Apple's, the CPU's and those of cuDNN and cuBLAS say it.
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


def compute_dtype(device: torch.device, name: str, say: Callable[[str], None]) -> torch.dtype:
    """Return the number format to compute in: the one asked for where the device has it.

    A CPU computes in float32 and the result is rounded once, when it is written: half precision
    is slow there and loses accuracy for nothing.

    Args:
        device: where the encoder runs.
        name: the format of the caches.
        say: told when it is another.
    """
    dtype = DTYPES[name]
    if dtype == torch.float32:
        return dtype
    has_it = device.type != "cpu"
    if device.type == "cuda" and dtype == torch.bfloat16:
        has_it = torch.cuda.is_bf16_supported(including_emulation=False)
    if not has_it:
        say(f"{device.type} computes in float32; the caches are stored as {name}")
        return torch.float32
    return dtype


def within_memory(
    work: Callable[Given, Result], *args: Given.args, **options: Given.kwargs
) -> Result | None:
    """Do some work, or return None where the memory of a GPU or of this machine does not suffice.

    None is returned after the error is gone, and with its traceback the activations that filled
    the memory: within a handler nothing could be computed in their place.
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
