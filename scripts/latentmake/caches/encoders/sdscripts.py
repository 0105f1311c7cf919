"""Latents as sd-scripts keeps them: which are scaled, what is beside them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from latentmake.caches.encoders.device import compute_dtype
from latentmake.caches.encoders.vae import encode_images, load_vae
from latentmake.caches.job import Encoder, Sample
from latentmake.config import Dataset, Model
from latentmake.geometry.buckets import Size
from latentmake.geometry.sdscripts_buckets import crop_ltrb
from latentmake.layouts.sdscripts import array_name

__all__ = ["latents"]


def latents(
    model: Model, settings: Dataset, device: torch.device, say: Callable[[str], None]
) -> Encoder:
    """Load the VAE of a model of sd-scripts.

    Args:
        model: names it.
        settings: the dataset's `flip_aug`.
        device: where it shall run.
        say: told of number formats.

    Raises:
        ModelError: it is missing or of another kind.
    """
    from diffusers.utils import logging

    logging.set_verbosity_error()
    architecture = model.architecture
    assert architecture is not None
    vae = load_vae(model.vae, device, compute_dtype(device, model.vae_dtype or model.dtype, say))

    def encoded(pixels: torch.Tensor, seeds: list[int] | None) -> torch.Tensor:
        found = encode_images(vae, pixels, seeds=seeds)
        if model.spec.scale is None:
            return found
        shift, factor = model.spec.scale
        return (found - shift) * factor

    def encode(samples: list[Sample]) -> list[tuple[dict[str, torch.Tensor], dict[str, str]]]:
        pixels = torch.from_numpy(np.stack([np.asarray(sample.content) for sample in samples]))
        seeds = None
        if model.posterior == "sample":
            seeds = [(int(each.key[:15], 16) + model.posterior_seed) % 2**63 for each in samples]
        made = {"latents": encoded(pixels, seeds)}
        if settings.flip_aug:
            others = None if seeds is None else [(seed + 1) % 2**63 for seed in seeds]
            made["latents_flipped"] = encoded(pixels.flip(2), others)
        target = Size(pixels.shape[2], pixels.shape[1])
        results: list[tuple[dict[str, torch.Tensor], dict[str, str]]] = []
        for index, sample in enumerate(samples):
            arrays = {kind: rows[index].clone() for kind, rows in made.items()}
            arrays["original_size"] = torch.tensor(sample.original)
            crop = crop_ltrb(target, Size(*sample.original))
            arrays["crop_ltrb"] = torch.tensor(crop, dtype=torch.float64)
            if sample.alpha is not None:
                arrays["alpha_mask"] = torch.from_numpy(sample.alpha.astype(np.float32) / 255.0)
            height, width = made["latents"].shape[2:]
            results.append(
                (
                    {
                        array_name(kind, architecture, height, width): array
                        for kind, array in arrays.items()
                    },
                    {},
                )
            )
        return results

    return encode
