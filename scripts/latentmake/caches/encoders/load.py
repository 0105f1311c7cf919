"""Loading the encoder of an order."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

import psutil
import torch

from latentmake.caches.encoders.device import free_memory, pick_device
from latentmake.caches.inputs import Loaded
from latentmake.config.models import Model
from latentmake.plan.orders import Order

_IMAGE, _CLIP, _TOKEN = 3000, 16_000, 400_000
"""Bytes that encoding takes at the most: a pixel of an image, or of a clip's frame, and a token of
a T5-XXL, in float32."""
_MOST = {"latents": 64, "text": 256}  # samples in a batch
_IN_FLIGHT = 3  # batches on their way through a GPU
_ROWS, _CAPTIONS = 150, 4  # tokens and captions in a batch on a CPU: with more a core gains little
_COMPILER = "torch._dynamo"
_MASKS = "torch._dynamo._trace_wrapped_higher_order_op"
_QUIET = {
    "DIFFUSERS_VERBOSITY": "error",
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
}


def encoder(
    order: Order, *, threads: int, say: Callable[[str], None], alone: bool = False
) -> Loaded:
    """Load the encoder of an order.

    On a CPU several threads encode a picture or a few captions each, side by side: threads that
    share the work on one small sample wait for each other most of the time. On a GPU batches take
    half of the memory that is free, and are encoded one after the other, while results of those
    before are written. There float32 is not computed in TF32, as cuDNN would: its 10 bits of
    mantissa are those of float16.

    A process that works on this order `alone` leaves out imports that encoding does not need.

    Raises:
        ModelError: the model is missing or incomplete.
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
    torch.set_num_threads(max(1, threads // workers) if on_cpu else threads)
    torch.backends.cudnn.allow_tf32 = False
    os.environ.update(_QUIET)  # read when these libraries are imported

    def load() -> Loaded:
        name, function = order.layout.encoder(order.kind)
        module = import_module(f"latentmake.caches.encoders.{name}")
        loaded: Loaded = getattr(module, function)(order, device, say)
        return loaded

    loaded = None
    if alone:
        try:
            with without(*_unused(model, order.kind)):
                loaded = load()
        except Exception as error:  # a package beside theirs, as xformers, needs what is hidden
            wrapped = "import" in str(error)  # by diffusers, or by our own line
            if not wrapped and not isinstance(error, ImportError | AttributeError):
                raise
    return (loaded or load())._replace(
        size=size,
        budget=budget,
        workers=workers,
        threads=torch.get_num_threads() if on_cpu else None,
        queues=not on_cpu,
    )


def _unused(model: Model, kind: str) -> tuple[str, ...]:
    """Return modules that diffusers and transformers import where they are, and need not."""
    # Of chat templates, another way to wait for the hub, and image processors.
    unused = ("jinja2", "trio", "torchvision")
    if kind == "latents":
        return unused if model.clip else (*unused, "transformers", "peft", "accelerate")
    # Projections with code of their own are parts of pipelines.
    plain = all(each.path is not None and each.projection is None for each in model.text)
    return (*unused, "peft", "accelerate") if plain else unused


@contextmanager
def without(*names: str) -> Iterator[None]:
    """Hide modules that are not imported yet, as if they were not installed, and torch's compiler.

    diffusers and transformers import them wherever they are: most of the time until a job encodes.
    The process must never need them: modules imported meanwhile may remember their absence. What
    they decorate for the compiler stays as it is.
    """
    changes: list[tuple[Any, str, Any]] = [(torch.distributed, "is_available", bool)]
    # None there: an import fails, a search finds nothing
    hidden: dict[str, Any] = {name: None for name in names if name not in sys.modules}
    if _COMPILER not in sys.modules:
        hidden |= {_COMPILER: None, _MASKS: (masks := ModuleType(_MASKS))}
        masks.TransformGetItemToIndex = lambda: (  # type: ignore[attr-defined]
            import_module(_MASKS).TransformGetItemToIndex()
        )
        unchanged = dict.fromkeys(
            ("allow_in_graph", "assume_constant_result", "disable"), _unchanged
        )
        changes += [(torch.compiler, name, each) for name, each in unchanged.items()]
        changes.append((torch, "_dynamo", SimpleNamespace(**unchanged)))
    before = [(place, name, vars(place).get(name)) for place, name, _ in changes]
    try:
        sys.modules.update(hidden)
        for place, name, each in changes:
            setattr(place, name, each)
        yield
    finally:
        for place, name, each in before:
            if each is None:
                delattr(place, name)
            else:
                setattr(place, name, each)
        for name, each in hidden.items():
            if sys.modules.get(name) is each:
                sys.modules.pop(name, None)


def _unchanged(function: Any = None, *_: object, **__: object) -> Any:
    return _unchanged if function is None else function


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
