"""Refusals: content that cannot be cached, with a hint for the user."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

from latentmake.caches.inputs import Sample
from latentmake.config.models import Model
from latentmake.plan.lock import read_lock
from latentmake.plan.orders import Order


def fault_of(tensors: dict[str, Any], nonzero: Collection[str] | None = None) -> str | None:
    """Return what is wrong with the tensors of a target: NaN, infinity, all zeros.

    `nonzero` names those that cannot be all zeros; by default none can.
    """
    for name, tensor in tensors.items():
        small = tensor.is_floating_point() and tensor.element_size() == 1
        if not (tensor.float() if small else tensor).isfinite().all():  # torch has none for 8 bits
            return f"NaN or infinity ({name})"
        if (nonzero is None or name in nonzero) and not tensor.any():
            return f"nothing but zeros ({name})"
    return None


def wrong_values(fault: str, model: Model) -> tuple[str, str]:
    """Return what is wrong with a target of a fault of `fault_of`, and a hint."""
    hint = "set `dtype: float32` in the model, or check the image and the weights"
    if model.scripted:  # scripts know no `dtype`
        hint = "check its file, and the weights and arguments of the model"
    return f"the encoder returned {fault}", hint


def too_large(sample: Sample, model: Model) -> tuple[str, str]:
    """Return what is wrong with a sample for which memory does not suffice, and a hint."""
    what = "not enough memory to encode it, even by itself"
    hint = "end other programs and run the same command again"
    if not isinstance(sample.content, str):
        what += f" ({' x '.join(map(str, sample.shape[:-1]))} pixels)"
        hint += ", or lower the resolution"
        key = "vae_cache_cpu" if model.spec.video else "vae_tiling"
        if not getattr(model, key):
            hint += f"; `{key}: true` in the model encodes in tiles (and all its latents again)"
    return what, hint


def skipped_before(order: Order, recipe: str) -> set[str]:
    """Return the stems of the items that earlier builds skipped, by the locks of the runs.

    `recipe` is the digest of the recipe that is the same now.
    """
    fault = {"dataset": order.dataset, "model": order.model, "kind": order.kind, "recipe": recipe}
    locks = (read_lock(path.parent.name) for path in Path("runs").glob("*/dataset.lock"))
    skipped = (each for lock in locks for each in lock.aside.get(order.dataset, ()))
    return {each["stem"] for each in skipped if fault.items() <= each.items()}
