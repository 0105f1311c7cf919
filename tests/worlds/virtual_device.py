"""A device that any machine has: what lies on it and on the CPU must not meet, as on a GPU.

Its tensors lie in the CPU's memory, in storages that are known. They say that they are on the
device, and an operation that takes some of both kinds raises an error, as CUDA's does.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from latentmake.trainers.loop import draw, recipe
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

DEVICE, CPU = torch.device("xpu", 0), torch.device("cpu")
_COPIES = {"copy_", "_to_copy", "_foreach_copy_", "index", "index_put_", "_index_put_impl_"}
_there: dict[int, torch.UntypedStorage] = {}  # which keeps them, so that no other takes their place


def _is_there(tensor: torch.Tensor) -> bool:
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        return tensor.untyped_storage()._cdata in _there


def _put(found: Any) -> Any:
    for each in tree_leaves(found):
        if isinstance(each, torch.Tensor):
            storage = each.untyped_storage()
            _there[storage._cdata] = storage
    return found


class _Operations(TorchDispatchMode):
    """Refuses operations that take tensors of both devices."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [x for x in tree_leaves((args, kwargs or {})) if isinstance(x, torch.Tensor)]
        there = [_is_there(each) for each in tensors]
        copies = func.overloadpacket.__name__ in _COPIES
        # A scalar on the CPU goes with all devices.
        others = [x.shape for x, known in zip(tensors, there, strict=True) if x.ndim and not known]
        if any(there) and others and not copies:
            raise RuntimeError(f"{func} takes tensors of the CPU, too: {others}")
        found = func(*args, **(kwargs or {}))
        return _put(found) if there and (there[0] if copies else any(there)) else found


class _Calls(TorchFunctionMode):
    """Translates the name of the device in calls, and answers with it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        given = [*args, *kwargs.values()]
        if func == torch.Tensor.device.__get__ and _is_there(args[0]):
            return DEVICE
        if name == "cpu" or (name == "to" and any(x in (CPU, "cpu") for x in given[1:])):
            if _is_there(args[0]):
                with torch._C.DisableTorchFunction(), _disable_current_modes():
                    args = (args[0].clone(), *args[1:])
            return func(*args, **kwargs)
        if name == "numpy" and _is_there(args[0]):
            raise TypeError("can't convert a tensor of the device to numpy")
        if name == "_parse_to" or DEVICE not in [x for x in given if isinstance(x, torch.device)]:
            return func(*args, **kwargs)
        here = [CPU if isinstance(each, torch.device) else each for each in args]
        found = func(*here, **{k: CPU if x == DEVICE else x for k, x in kwargs.items()})
        if name == "to" and found is args[0]:
            return found if _is_there(found) else _put(found.clone())
        return _put(found)


@contextmanager
def virtual_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have trainings and drawings use the device."""
    plain = torch.autocast
    monkeypatch.setattr(Accelerator, "device", property(lambda _: DEVICE))
    monkeypatch.setattr(torch, "autocast", lambda kind, *of, **how: plain("cpu", *of, **how))
    for module in (draw, recipe):
        monkeypatch.setattr(module, "pick_device", lambda: DEVICE)
    try:
        with _Operations(), _Calls():
            yield
    finally:
        _there.clear()
