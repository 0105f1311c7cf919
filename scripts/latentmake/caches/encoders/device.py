"""Device and dtype of encoders, and recovery from out-of-memory errors."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import psutil
import torch

from latentmake.caches.gpu import visible
from latentmake.errors import DeviceError, first_line, is_device_fault, is_out_of_memory

_AGAIN = "check it with nvidia-smi, then run the same command; finished files are kept"

Given = ParamSpec("Given")
Result = TypeVar("Result")

DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def pick_device() -> torch.device:
    """Return CUDA (or ROCm) where there is one, else Apple's, else the CPU.

    Raises:
        DeviceError: torch does not see this machine's GPU; a CPU takes a hundred times as long.
    """
    if torch.cuda.is_available():
        return torch.device("cuda")
    if torch.backends.mps.is_available():
        return torch.device("mps")
    if found := visible():
        raise DeviceError(
            f"torch {torch.__version__} does not see it: {_why_unseen()}",
            where=f"GPU {', '.join(found)}",
            hint="update the driver or install a torch built for it, or set "
            "`CUDA_VISIBLE_DEVICES=` (empty) to compute on the CPU",
        )
    return torch.device("cpu")


def _why_unseen() -> str:
    """Return torch's own words for a GPU that it does not see."""
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:  # the latter of a torch for CPUs
        return first_line(error)
    return "it finds no device"


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

    Raises:
        DeviceError: the GPU is in error.
    """
    return attempt(work, *args, **options)[0]


def attempt(
    work: Callable[Given, Result], *args: Given.args, **options: Given.kwargs
) -> tuple[Result | None, str]:
    """Do some work; where memory does not suffice, return None and the library's words.

    By then the error is gone, and with its traceback the activations that filled the memory: inside
    an exception handler they would still be alive.

    Raises:
        DeviceError: the GPU is in error.
    """
    try:
        return work(*args, **options), ""
    except (RuntimeError, MemoryError) as error:
        words = first_line(error)
        known = isinstance(error, torch.OutOfMemoryError | MemoryError)
        if not known and not is_out_of_memory(str(error)):
            if is_device_fault(str(error)):
                raise DeviceError(words, where="GPU", hint=_AGAIN) from None
            raise
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    elif torch.backends.mps.is_available():
        torch.mps.empty_cache()
    return None, words


def free_memory(device: torch.device) -> int:
    """Return the bytes that this process can still use on a GPU.

    Those that torch keeps for reuse are among them; a limit of torch's allocator counts.
    """
    if device.type != "cuda":  # an Apple GPU has the machine's
        return psutil.virtual_memory().available
    free, total = torch.cuda.mem_get_info(device)
    reserved = torch.cuda.memory_reserved(device)
    index = torch.cuda.current_device() if device.index is None else device.index
    allowed = int(total * torch.cuda.get_per_process_memory_fraction(index)) - reserved
    return min(free, allowed) + reserved - torch.cuda.memory_allocated(device)


def held_by_others() -> tuple[int, int]:
    """Return the bytes of the GPU's memory, or the machine's, that other programs hold, and all.

    What this process holds of a GPU besides torch's tensors, its context, counts as theirs.
    """
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        own = torch.cuda.memory_reserved()
    else:  # an Apple GPU has the machine's
        memory = psutil.virtual_memory()
        free, total, own = memory.available, memory.total, psutil.Process().memory_info().rss
    return max(total - free - own, 0), total
