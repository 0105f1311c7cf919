"""Copies to and from a GPU that do not wait for it.

A GPU works through a queue. What waits for a result, as `.cpu()`, `.item()` and a copy from
ordinary memory do, leaves it idle until the next work is queued. Copies from and to pinned memory
are queued like other work. CUDA's host allocator keeps pinned memory for the next tensor, and hands
it out only when the queued copies from or to it are done, so that no buffer is overwritten early
(source: torch, `record_event` in aten/src/ATen/native/cuda/Copy.cu).

There is one queue, so that a copy never runs beside the encoding: at 25 GB/s the pixels of a
picture take about a hundredth of the time that its encoding takes.

On other devices nothing is pinned: a CPU's tensors are handed on as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

Wait = Callable[[], list[torch.Tensor]]
"""Waits for copies and returns them, on the CPU."""


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
