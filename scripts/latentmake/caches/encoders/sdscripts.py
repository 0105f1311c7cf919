"""Encoders of sd-scripts' layout: latents with the arrays beside them; text as in `plain`."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from latentmake.caches.encoders import Encoded, Loaded
from latentmake.caches.encoders.plain import ImageEncoder, text
from latentmake.caches.inputs import Sample
from latentmake.geometry.buckets import Size
from latentmake.geometry.sdscripts_buckets import crop_ltrb
from latentmake.layouts.sdscripts import array_name
from latentmake.plan.orders import WorkOrder

__all__ = ["latents", "text"]


def latents(
    order: WorkOrder, device: torch.device, size: int, say: Callable[[str], None]
) -> Loaded:
    """Load the VAE."""
    model = order.model_settings
    architecture = model.architecture
    assert architecture is not None
    encoder = ImageEncoder(model, device, say)
    kinds = {"latents": False} | (
        {"latents_flipped": True} if order.dataset_settings.flip_aug else {}
    )
    shift, factor = model.spec.scale or (0.0, 1.0)

    def encode(samples: list[Sample]) -> Encoded:
        made = {
            kind: (encoder.encode(samples, flipped=flipped) - shift) * factor
            for kind, flipped in kinds.items()
        }
        height, width = made["latents"].shape[2:]
        results: Encoded = []
        for index, sample in enumerate(samples):
            target = Size(sample.shape[1], sample.shape[0])
            crop = crop_ltrb(target, Size(*sample.original))
            arrays = {kind: rows[index].clone() for kind, rows in made.items()} | {
                "original_size": torch.tensor(sample.original),
                "crop_ltrb": torch.tensor(crop, dtype=torch.float64),
            }
            if sample.alpha is not None:
                arrays["alpha_mask"] = torch.from_numpy(sample.alpha.astype(np.float32) / 255.0)
            named = {
                array_name(kind, architecture, height, width): array
                for kind, array in arrays.items()
            }
            results.append((named, {}))
        return results

    return Loaded(encode, size)
