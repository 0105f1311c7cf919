"""Loading the encoder of a work order."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from importlib import import_module

import torch

from latentmake.caches.encoders import Loaded
from latentmake.caches.encoders.device import pick_device
from latentmake.caches.encoders.imports import encoding_only
from latentmake.config import Model
from latentmake.models.files import encoder_files
from latentmake.plan.orders import WorkOrder

__all__ = ["encoder"]

_OVERHEAD = 1_000_000_000  # bytes of memory besides the weights, at the least
_BATCH = {  # samples at once on a GPU; (Wan, kind)
    (False, "latents"): 8,
    (False, "text"): 32,
    (True, "latents"): 4,
    (True, "text"): 16,
}


def encoder(
    order: WorkOrder, *, threads: int, say: Callable[[str], None], alone: bool = False
) -> Loaded:
    """Load the encoder of an order: one sample at a time on a CPU, several on a GPU.

    A process that works on this order `alone` leaves out imports that encoding does not need.

    Raises:
        ModelError: the model is missing or incomplete.
    """
    torch.set_num_threads(threads)
    device = pick_device()
    model = order.model_settings
    size = 1 if device.type == "cpu" else _BATCH[model.spec.video, order.kind]
    say(f"encoding on {device.type}, {size} at once")
    if line := _too_little_memory(model, order.kind, device):
        say(line)
    unused: tuple[str, ...] = ()
    if order.kind == "latents" and model.clip is None:
        unused = ("transformers", "peft", "accelerate")
    with encoding_only(*unused) if alone else nullcontext():
        module = import_module(f"latentmake.caches.encoders.{order.layout.encoding}")
        load = module.latents if order.kind == "latents" else module.text
        loaded: Loaded = load(order, device, size, say)
    return loaded


def _too_little_memory(model: Model, kind: str, device: torch.device) -> str | None:
    """Return a warning if the weights may not fit into a GPU's free memory."""
    if device.type != "cuda":
        return None
    places = model.text if kind == "text" else [model.vae, *filter(None, [model.clip])]
    local = [place for place in places if place.path is not None]
    size = sum(file.stat().st_size for place in local for file in encoder_files(model, place))
    free, total = torch.cuda.mem_get_info(device)
    if free >= size + _OVERHEAD:
        return None
    return (
        f"the GPU has {free / 1e9:.1f} of {total / 1e9:.1f} GB free, and the weights alone take "
        f"about {size / 1e9:.1f}: end other programs on it if memory runs out"
    )
