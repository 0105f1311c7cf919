"""A small network on a CPU: recorded, and for small pictures in batches, the same bit by bit.

Threads that encode side by side hold Python's lock in turn. A layer of a tiny network takes no
longer than the Python around it, so that two threads would be hardly faster than one. A recording
runs no Python between layers.
"""

from __future__ import annotations

import math
import threading
import time
import warnings
from typing import Any

import torch

_FIRST, _LATER = 0.25, 0.02  # seconds of an encoding, with and without its preparations, at most
_TOGETHER, _SMALL = 4, 1 << 14  # pictures, and pixels of each: beyond these a batch gains nothing


class _Convolution(torch.nn.Conv2d):
    """A convolution by oneDNN, whatever its size."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = torch.ops.aten.mkldnn_convolution(
            values, self.weight, self.bias, self.padding, self.stride, self.dilation, self.groups
        )
        return found


def by_onednn(network: torch.nn.Module) -> None:
    """Let oneDNN do all convolutions of a network of float32 on a CPU, if torch has it.

    torch does a small picture alone in another way than a batch (`use_mkldnn` in
    aten/src/ATen/native/Convolution.cpp), so that their last bits would differ.
    """
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return
    for layer in network.modules():
        is_plain = type(layer) is torch.nn.Conv2d and layer.padding_mode == "zeros"
        if is_plain and not isinstance(layer.padding, str) and layer.weight.dtype == torch.float32:
            layer.__class__ = _Convolution


def pictures_at_once(shape: tuple[int, ...]) -> int:
    """Return how many pictures of [H, W, ...] a CPU encodes at once, if bits stay equal."""
    return _TOGETHER if math.prod(shape[:2]) <= _SMALL else 1


class Recorded(torch.nn.Module):
    """A network of one input and one output, the same bit by bit.

    The recording is used for shapes for which it is quick and gives the network's own bits: of a
    batch those that it gives of each row alone.

    Args:
        network: in inference mode, on the CPU.
    """

    def __init__(self, network: torch.nn.Module) -> None:
        super().__init__()
        self.network = network
        self._recording: torch.nn.Module | None = None
        self._is_equal: dict[torch.Size, bool] = {}
        self._lock = threading.RLock()

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Return the network's output."""
        if len(values) not in (1, _TOGETHER):  # too few to try it
            return self._rows(values)
        if values.shape not in self._is_equal:
            with self._lock:
                if values.shape not in self._is_equal:
                    return self._compare(values)
        if self._is_equal[values.shape]:
            return self._replay(values)
        return self._run(values) if len(values) == 1 else self._rows(values)

    def _rows(self, values: torch.Tensor) -> torch.Tensor:
        return torch.cat([self(row[None]) for row in values])

    def _run(self, values: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.network(values)
        return found

    def _replay(self, values: torch.Tensor) -> torch.Tensor:
        assert self._recording is not None
        as_it_is: Any = torch.jit.optimized_execution  # type: ignore[attr-defined]
        with as_it_is(False):
            found: torch.Tensor = self._recording(values)
        return found

    def _compare(self, values: torch.Tensor) -> torch.Tensor:
        if len(values) > 1:
            expected = self._rows(values)
            is_quick = self._is_equal[values[:1].shape]
        else:
            expected, seconds = self._timed(values)
            is_quick = seconds < _FIRST and self._timed(values)[1] < _LATER
        self._is_equal[values.shape] = is_quick and self._records(values, expected)
        return expected

    def _timed(self, values: torch.Tensor) -> tuple[torch.Tensor, float]:
        began = time.perf_counter()
        return self._run(values), time.perf_counter() - began

    def _records(self, values: torch.Tensor, expected: torch.Tensor) -> bool:
        """Record the network if it is not yet; return whether the recording gives what it does."""
        try:
            if self._recording is None:
                with warnings.catch_warnings(), torch.inference_mode(False), torch.no_grad():
                    warnings.simplefilter("ignore")  # a later torch may have none of this
                    example = torch.zeros_like(values)
                    trace: Any = torch.jit.trace
                    self._recording = trace(self.network, example, check_trace=False)
            return torch.equal(self._replay(values), expected)
        except Exception:  # whatever a network does that cannot be recorded
            return False
