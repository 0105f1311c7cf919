"""Time and memory of batches on a device, by the device's own account."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch

from latentmake import digest
from latentmake.caches.batch_sizes import BatchSizes, Remembered
from latentmake.caches.encoders import Encoded, Encoder
from latentmake.caches.inputs import Sample
from latentmake.plan.orders import Order

_MOST = {"latents": 64, "text": 256}  # samples in a batch


class Watch(Protocol):
    """Measures what is queued on a device between its making and `stop`."""

    def stop(self) -> tuple[int, int]:
        """Return the bytes taken at the most, and those that were free before."""

    def seconds(self) -> float:
        """Wait for the device and return how long it worked."""


class _CudaWatch:
    """Watch of a CUDA device.

    Events are marks in its queue. The first one is passed when the work before it is done, so that
    no time counts in which the device was busy with another batch, or waited for none. Memory is
    counted when work is queued, without waiting.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free = free_memory(device)
        torch.cuda.reset_peak_memory_stats(device)
        self._before = torch.cuda.memory_allocated(device)
        event: Any = torch.cuda.Event
        self._began, self._ended = (event(enable_timing=True, blocking=True) for _ in range(2))
        self._began.record()

    def stop(self) -> tuple[int, int]:
        self._ended.record()
        return torch.cuda.max_memory_allocated(self._device) - self._before, self._free

    def seconds(self) -> float:
        self._ended.synchronize()
        return float(self._began.elapsed_time(self._ended)) / 1000


class _Clock:
    """Watch of a device that is done when its work was given to it; it knows nothing of memory."""

    def __init__(self) -> None:
        self._began = self._ended = time.perf_counter()

    def stop(self) -> tuple[int, int]:
        self._ended = time.perf_counter()
        return 0, 0

    def seconds(self) -> float:
        return self._ended - self._began


def watch_of(device: torch.device) -> Watch:
    """Begin to measure a device."""
    return _CudaWatch(device) if device.type == "cuda" else _Clock()


def free_memory(device: torch.device) -> int:
    """Return the bytes that this process can still use on a CUDA device.

    Those that torch keeps for reuse are among them; a limit of torch's allocator counts.
    """
    free, total = torch.cuda.mem_get_info(device)
    reserved = torch.cuda.memory_reserved(device)
    index = torch.cuda.current_device() if device.index is None else device.index
    allowed = int(total * torch.cuda.get_per_process_memory_fraction(index)) - reserved
    return min(free, allowed) + reserved - torch.cuda.memory_allocated(device)


def measured(
    encode: Encoder,
    sizes: BatchSizes,
    device: torch.device,
    watch: Callable[[torch.device], Watch] = watch_of,
) -> Encoder:
    """Return an encoder that tells batch sizes of the memory and time of each batch."""

    def run(samples: list[Sample]) -> Encoded:
        shape, count = samples[0].shape, len(samples)
        started = watch(device)
        encoded = encode(samples)
        taken, free = started.stop()
        sizes.launched(shape, count, taken, free)

        def results() -> Iterator[tuple[dict[str, Any], dict[str, str]]]:
            yield from encoded
            sizes.encoded(shape, count, started.seconds())

        return results()

    return run


def batch_sizes(order: Order, device: torch.device) -> BatchSizes:
    """Return the batch sizes of a loaded encoder on a CUDA device, remembered by their recipe."""
    of = torch.cuda.get_device_properties(device)
    name = f"{of.name}, {of.total_memory >> 20} MiB, {order.kind}"
    remembered = Remembered(f"{name}, {digest.of_value(order.recipe)[:16]}")
    return BatchSizes(_MOST[order.kind], free=free_memory(device), remembered=remembered)
