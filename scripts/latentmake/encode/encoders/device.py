"""Encoders on a device: loading, dtype, copies, and recovery from out-of-memory errors.

A GPU works through a queue. Operations that wait for a result, such as `.cpu()`, `.item()` and a
copy from pageable memory, leave it idle until more work is queued. Copies from and to pinned memory
are queued like other work. CUDA's host allocator reuses pinned memory for the next tensor only when
the queued copies from or to it are done, so no buffer is overwritten early (source: torch,
`record_event` in aten/src/ATen/native/cuda/Copy.cu).

There is a single queue, so a copy never runs beside the encoding. This costs little: at 25 GB/s,
copying the pixels of a picture takes about a hundredth of the time of encoding it.

Memory is pinned only for CUDA. On a CPU, tensors are passed on as they are.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from typing import ParamSpec, TypeVar

import numpy as np
import psutil
import torch
from numpy.typing import NDArray

from latentmake.base.errors import DeviceError, first_line, is_device_fault, is_out_of_memory
from latentmake.encode.gpu import visible
from latentmake.encode.reading import Loaded
from latentmake.plan.orders import Order

_AGAIN = "check it with nvidia-smi, then run the same command; finished files are kept"

Wait = Callable[[], list[torch.Tensor]]
"""Function that waits for copies and returns them, on the CPU."""
Given = ParamSpec("Given")
Result = TypeVar("Result")

DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}

_IMAGE, _CLIP, _TOKEN = 3000, 16_000, 400_000
"""Most bytes that encoding needs in float32: for a pixel of an image, for a pixel of a clip's
frame, and for a token of a T5-XXL."""
_MOST = {"latents": 64, "text": 256, "captions": 8}  # largest number of samples in a batch on a GPU
_IN_FLIGHT = 3  # workers on a GPU: one queues work, others wait for results and write
_ROWS, _CAPTIONS = 150, 4  # tokens and captions in a batch on a CPU; larger ones gain little


# -- loading --------------------------------------------------------------------------------------


def encoder(order: Order, *, threads: int, say: Callable[[str], None]) -> Loaded:
    """Load the encoder of an order; raises ModelError.

    On a CPU, several threads work in parallel, each on one picture or a few captions. Threads that
    share one small sample would wait for each other most of the time. On a GPU, batches take up to
    half of the free memory and are encoded one after the other, while earlier results are written.
    TF32, which cuDNN uses for float32 by default, is off: its mantissa has 10 bits, like float16.
    """
    device = pick_device()
    model = order.model_settings
    on_cpu = device.type == "cpu"
    if order.makes_captions:  # it waits for each token, so nothing is queued; batches fill a GPU
        workers, size, budget = 1, 1 if on_cpu else _MOST["captions"], None
        say(f"captioning on {device.type}, at most {size} at once")
    elif on_cpu:
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

    name, function = order.layout.encoders[order.kind]
    module = import_module(f"latentmake.encode.encoders.{name}")
    loaded: Loaded = getattr(module, function)(order, device, say)
    return loaded._replace(
        size=size,
        budget=budget,
        workers=workers,
        begin=partial(torch.set_num_threads, threads) if on_cpu else bool,
        queues=not (on_cpu or order.makes_captions),
    )


def _side_by_side(order: Order, threads: int) -> int:
    """Return how many samples a CPU encodes at once: one per thread, if memory allows."""
    sizes = [
        target.size.width * target.size.height * (_CLIP if target.clip else _IMAGE)
        for target in order.targets
        if target.size is not None and order.kind == "latents"
    ]
    available = psutil.virtual_memory().available // 2
    return max(1, min(threads, available // max(sizes, default=1)))


# -- device and memory ----------------------------------------------------------------------------


def pick_device() -> torch.device:
    """Return CUDA (or ROCm) if available, else Apple's GPU, else the CPU.

    Raises:
        DeviceError: a GPU is visible, but torch cannot use it.
    """
    if torch.cuda.is_available():
        return torch.device("cuda")
    if torch.backends.mps.is_available():
        return torch.device("mps")
    if not (gpus := visible()):
        return torch.device("cpu")
    # Otherwise the job would fall back to the CPU unnoticed, which is far slower.
    why = "it finds no device"
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:  # a CPU build of torch raises AssertionError
        why = first_line(error)
    raise DeviceError(
        f"torch {torch.__version__} does not see it: {why}",
        where=f"GPU {', '.join(gpus)}",
        hint="update the driver or install a torch built for it, or set "
        "`CUDA_VISIBLE_DEVICES=` (empty) to compute on the CPU",
    )


def compute_dtype(
    device: torch.device, name: str, say: Callable[[str], None], *, cpu_bfloat16: bool = False
) -> torch.dtype:
    """Return the dtype to compute in: the dtype of the caches if the device has it, else float32.

    A CPU computes in float32, and results are rounded once, when they are written: half precision
    is usually slow there, and loses accuracy. With `cpu_bfloat16`, a CPU with instructions for
    bfloat16 computes in bfloat16.
    """
    dtype = DTYPES[name]
    if dtype == torch.float32:
        return dtype
    has_it = device.type != "cpu"
    if not has_it and cpu_bfloat16 and dtype == torch.bfloat16:
        capabilities = torch.cpu.get_capabilities()
        has_it = bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))
    if device.type == "cuda" and dtype == torch.bfloat16:
        has_it = torch.cuda.is_bf16_supported(including_emulation=False)
    if not has_it:
        say(f"{device.type} computes in float32; the caches are stored as {name}")
        return torch.float32
    return dtype


def pixel_bytes(pixels: torch.Tensor) -> torch.Tensor:
    """Return decoded pixels, -1 to 1, as bytes, 0 to 255, on the CPU.

    Raises:
        FloatingPointError: pixels are NaN or infinite; as bytes they would look black.
    """
    values = (pixels.float() + 1) * 127.5
    if not values.isfinite().all():
        raise FloatingPointError("check the weights of the VAE")
    return values.round().clamp(0, 255).to(torch.uint8).cpu()


def attempt(
    work: Callable[Given, Result], *args: Given.args, **options: Given.kwargs
) -> tuple[Result | None, str]:
    """Do some work and return its result and ""; on OOM, free memory and return None and a message.

    The caller retries after this function, not inside an exception handler: there the traceback
    would still hold the activations that filled the memory. The message is the library's.

    Raises:
        DeviceError: the GPU is in error.
    """
    try:
        return work(*args, **options), ""
    except (RuntimeError, MemoryError) as error:
        message = first_line(error)
        is_oom = isinstance(error, torch.OutOfMemoryError | MemoryError)
        if not is_oom and not is_out_of_memory(str(error)):
            if is_device_fault(str(error)):
                raise DeviceError(message, where="GPU", hint=_AGAIN) from None
            raise
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    elif torch.backends.mps.is_available():
        torch.mps.empty_cache()
    return None, message


def free_memory(device: torch.device) -> int:
    """Return the bytes of a GPU that torch may still allocate: free memory, and its own cache."""
    if device.type != "cuda":  # an Apple GPU shares the machine's memory
        return psutil.virtual_memory().available
    free, total = torch.cuda.mem_get_info(device)
    reserved = torch.cuda.memory_reserved(device)
    allowed = int(total * torch.cuda.get_per_process_memory_fraction()) - reserved
    return min(free, allowed) + reserved - torch.cuda.memory_allocated(device)


def held_by_others() -> tuple[int, int]:
    """Return the bytes that other programs hold of the device's memory, and its total bytes."""
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        own = torch.cuda.memory_reserved()  # this process's CUDA context counts as others'
    else:  # a CPU and an Apple GPU use the machine's memory
        memory = psutil.virtual_memory()
        free, total, own = memory.available, memory.total, psutil.Process().memory_info().rss
    return max(total - free - own, 0), total


# -- copies ----------------------------------------------------------------------------------------


def stacked(arrays: Sequence[NDArray[np.uint8]], device: torch.device) -> torch.Tensor:
    """Return arrays of one shape as one tensor on a device, [N, ...].

    On a CPU a single writable array is not copied, since it may be a large clip.
    """
    if device.type == "cuda":
        pinned = torch.empty((len(arrays), *arrays[0].shape), dtype=torch.uint8, pin_memory=True)
        np.stack(arrays, out=pinned.numpy())
        return pinned.to(device, non_blocking=True)
    # torch warns about read-only arrays
    is_shared = len(arrays) == 1 and arrays[0].flags.writeable
    return torch.from_numpy(arrays[0][None] if is_shared else np.stack(arrays)).to(device)


def upload(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a tensor from the CPU to a device, without waiting on CUDA."""
    if device.type == "cuda" and not values.is_cuda:
        return values.pin_memory().to(device, non_blocking=True)
    return values.to(device)


def download(tensors: Sequence[torch.Tensor]) -> Wait:
    """Begin to copy tensors to the CPU, and return a function that waits for the copies.

    Waiting raises errors of the device.
    """
    if not any(tensor.is_cuda for tensor in tensors):
        on_cpu = [tensor.cpu() for tensor in tensors]
        return lambda: on_cpu
    copies = [
        torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(
            tensor, non_blocking=True
        )
        if tensor.is_cuda
        else tensor
        for tensor in tensors
    ]
    # `blocking`: the waiting thread sleeps instead of taking a core from the decoding threads.
    done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    done.record()

    def wait() -> list[torch.Tensor]:
        done.synchronize()
        return copies

    return wait
