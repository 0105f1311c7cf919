"""Encoders on a device: loading, dtype, copies, and recovery from out-of-memory errors.

A GPU works through a queue. What waits for a result, as `.cpu()`, `.item()` and a copy from
ordinary memory do, leaves it idle until the next work is queued. Copies from and to pinned memory
are queued like other work. CUDA's host allocator keeps pinned memory for the next tensor, and hands
it out only when the queued copies from or to it are done, so that no buffer is overwritten early
(source: torch, `record_event` in aten/src/ATen/native/cuda/Copy.cu).

There is one queue, so that a copy never runs beside the encoding: at 25 GB/s the pixels of a
picture take about a hundredth of the time that its encoding takes.

On other devices than CUDA's nothing is pinned: a CPU's tensors are handed on as they are.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from typing import ParamSpec, TypeVar

import numpy as np
import psutil
import torch
from numpy.typing import NDArray

from latentmake.caches.gpu import visible
from latentmake.caches.inputs import Loaded
from latentmake.errors import DeviceError, first_line, is_device_fault, is_out_of_memory
from latentmake.plan.orders import Order

_AGAIN = "check it with nvidia-smi, then run the same command; finished files are kept"

Wait = Callable[[], list[torch.Tensor]]
"""Waits for copies and returns them, on the CPU."""
Given = ParamSpec("Given")
Result = TypeVar("Result")

DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}

_IMAGE, _CLIP, _TOKEN = 3000, 16_000, 400_000
"""Bytes that encoding takes at the most: a pixel of an image, or of a clip's frame, and a token of
a T5-XXL, in float32."""
_MOST = {"latents": 64, "text": 256}  # samples in a batch
_IN_FLIGHT = 3  # batches on their way through a GPU
_ROWS, _CAPTIONS = 150, 4  # tokens and captions in a batch on a CPU: with more a core gains little
_QUIET = {
    "DIFFUSERS_VERBOSITY": "error",
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
}


# -- loading --------------------------------------------------------------------------------------


def encoder(order: Order, *, threads: int, say: Callable[[str], None]) -> Loaded:
    """Load the encoder of an order; raises ModelError.

    On a CPU several threads encode a picture or a few captions each, side by side: threads that
    share the work on one small sample wait for each other most of the time. On a GPU batches take
    half of the memory that is free, and are encoded one after the other, while results of those
    before are written. There float32 is not computed in TF32, as cuDNN would: its 10 bits of
    mantissa are those of float16.
    """
    device = pick_device()
    model = order.model_settings
    on_cpu = device.type == "cpu"
    if on_cpu:
        workers, size, budget = _side_by_side(order, threads), 1, None
        if order.kind == "text":
            size, budget = _CAPTIONS, _ROWS
        say(f"encoding on cpu, {workers} at once")
    else:
        taken = _TOKEN if order.kind == "text" else _CLIP if model.spec.video else _IMAGE
        workers, size, budget = _IN_FLIGHT, _MOST[order.kind], free_memory(device) // 2 // taken
        say(f"encoding on {device.type}, at most {size} at once")
    threads = max(1, threads // workers) if on_cpu else threads
    torch.set_num_threads(threads)
    torch.backends.cudnn.allow_tf32 = False
    os.environ.update(_QUIET)  # read when these libraries are imported

    name, function = order.layout.encoder(order.kind)
    module = import_module(f"latentmake.caches.encoders.{name}")
    loaded: Loaded = getattr(module, function)(order, device, say)
    return loaded._replace(
        size=size,
        budget=budget,
        workers=workers,
        begin=partial(torch.set_num_threads, threads) if on_cpu else bool,
        queues=not on_cpu,
    )


def _side_by_side(order: Order, threads: int) -> int:
    """Return how many samples to encode at once on a CPU: one a thread, if memory suffices."""
    targets = [target for item in order.items for target in item.targets]
    sizes = [
        each.size.width * each.size.height * (_CLIP if each.clip else _IMAGE)
        for each in targets
        if each.size is not None and order.kind == "latents"
    ]
    available = psutil.virtual_memory().available // 2
    return max(1, min(threads, available // max(sizes, default=1)))


# -- device and memory ----------------------------------------------------------------------------


def pick_device() -> torch.device:
    """Return CUDA (or ROCm) where there is one, else Apple's, else the CPU; raises DeviceError."""
    if torch.cuda.is_available():
        return torch.device("cuda")
    if torch.backends.mps.is_available():
        return torch.device("mps")
    if not (found := visible()):
        return torch.device("cpu")
    why = "it finds no device"
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:  # the latter of a torch for CPUs
        why = first_line(error)
    raise DeviceError(
        f"torch {torch.__version__} does not see it: {why}",
        where=f"GPU {', '.join(found)}",
        hint="update the driver or install a torch built for it, or set "
        "`CUDA_VISIBLE_DEVICES=` (empty) to compute on the CPU",
    )


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


def pixel_bytes(pixels: torch.Tensor) -> torch.Tensor:
    """Return decoded pixels, -1 to 1, as bytes, 0 to 255, on the CPU.

    Raises:
        FloatingPointError: they are NaN or infinite, which bytes would show as black.
    """
    values = (pixels.float() + 1) * 127.5
    if not values.isfinite().all():
        raise FloatingPointError("check the weights of the VAE")
    return values.round().clamp(0, 255).to(torch.uint8).cpu()


def within_memory(
    work: Callable[Given, Result], *args: Given.args, **options: Given.kwargs
) -> Result | None:
    """Return the result of some work, or None; see `attempt`."""
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
    """Return the bytes of a GPU, kept for reuse or free, that torch's allocator still allows."""
    if device.type != "cuda":  # an Apple GPU has the machine's
        return psutil.virtual_memory().available
    free, total = torch.cuda.mem_get_info(device)
    reserved = torch.cuda.memory_reserved(device)
    allowed = int(total * torch.cuda.get_per_process_memory_fraction()) - reserved
    return min(free, allowed) + reserved - torch.cuda.memory_allocated(device)


def held_by_others() -> tuple[int, int]:
    """Return the bytes of the GPU's memory, or the machine's, that others hold, and all."""
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        own = torch.cuda.memory_reserved()  # the context of this process counts as theirs
    else:  # an Apple GPU has the machine's
        memory = psutil.virtual_memory()
        free, total, own = memory.available, memory.total, psutil.Process().memory_info().rss
    return max(total - free - own, 0), total


# -- copies ----------------------------------------------------------------------------------------


def stacked(arrays: Sequence[NDArray[np.uint8]], device: torch.device) -> torch.Tensor:
    """Return arrays of one shape as one tensor on a device, [N, ...].

    On a CPU a single array, which may be a large clip, is not copied.
    """
    if device.type == "cuda":
        pinned = torch.empty((len(arrays), *arrays[0].shape), dtype=torch.uint8, pin_memory=True)
        np.stack(arrays, out=pinned.numpy())
        return pinned.to(device, non_blocking=True)
    # torch warns about arrays that cannot be written
    alone = len(arrays) == 1 and arrays[0].flags.writeable
    return torch.from_numpy(arrays[0][None] if alone else np.stack(arrays)).to(device)


def upload(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor of the CPU on a device."""
    if device.type == "cuda" and not values.is_cuda:
        return values.pin_memory().to(device, non_blocking=True)
    return values.to(device)


def download(tensors: Sequence[torch.Tensor]) -> Wait:
    """Begin to copy tensors to the CPU.

    An error of the device is raised when the copies are waited for.
    """
    if not any(each.is_cuda for each in tensors):
        found = [each.cpu() for each in tensors]
        return lambda: found
    copies = [
        torch.empty(each.shape, dtype=each.dtype, pin_memory=True).copy_(each, non_blocking=True)
        if each.is_cuda
        else each
        for each in tensors
    ]
    # `blocking`: the waiting thread sleeps, and takes no core from those that decode.
    done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    done.record()

    def wait() -> list[torch.Tensor]:
        done.synchronize()
        return copies

    return wait
