"""Encoders of the plain layout: an AutoencoderKL and text encoders of all kinds."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from latentmake.caches.encoders.device import DTYPES, compute_dtype, download, stacked
from latentmake.caches.inputs import Encoded, Loaded, Named, Sample, results
from latentmake.config.models import Model
from latentmake.layouts import layout
from latentmake.plan.orders import Order


class ImageEncoder:
    """The AutoencoderKL of a model.

    Raises:
        ModelError: it is missing or of another kind.
    """

    def __init__(self, model: Model, device: torch.device, say: Callable[[str], None]) -> None:
        # Seconds of import, which text jobs do without.
        from latentmake.caches.encoders.vae import encode_images, load_vae, tile

        self._model, self._device, self._encode = model, device, encode_images
        name = model.vae_dtype or model.dtype
        self.stored = DTYPES[name]
        self.vae = load_vae(model.vae, device, compute_dtype(device, name, say), decoder=False)
        if model.vae_tiling:
            tile(self.vae)

    def encode(self, samples: list[Sample], *, flipped: bool = False) -> torch.Tensor:
        """Encode samples, or their mirror images, to unscaled latents [N, C, h, w], float32.

        They are on the device, which may still be at work on them.
        """
        pixels = stacked([np.asarray(sample.content) for sample in samples], self._device)
        seeds = None
        if self._model.posterior == "sample":
            # From the seed and the key alone: no neighbour changes an item's noise.
            offset = self._model.posterior_seed + flipped
            seeds = [(int(sample.key[:15], 16) + offset) % 2**63 for sample in samples]
        return self._encode(self.vae, pixels.flip(2) if flipped else pixels, seeds=seeds)


def latents(order: Order, device: torch.device, say: Callable[[str], None]) -> Loaded:
    """Load the VAE."""
    encoder = ImageEncoder(order.model_settings, device, say)
    scale = float(encoder.vae.config.get("scaling_factor") or 1.0)
    shift = float(encoder.vae.config.get("shift_factor") or 0.0)

    def named(sample: Sample, row: torch.Tensor) -> Named:
        height, width = sample.shape[:2]
        told = layout.plain_latents_metadata(scale, shift, sample.original, (width, height))
        return {layout.LATENTS: row}, told

    def encode(samples: list[Sample]) -> Encoded:
        return results(samples, download([encoder.encode(samples).to(encoder.stored)]), named)

    return Loaded(encode)


def text(order: Order, device: torch.device, say: Callable[[str], None]) -> Loaded:
    """Load the text encoders."""
    from latentmake.caches.encoders.text import text_encoders

    model = order.model_settings
    dtype = compute_dtype(device, model.caption_dtype, say)
    encoders = text_encoders(model, device, dtype, stored=DTYPES[model.caption_dtype])
    return encoders.loaded(lambda caption, tensors: (tensors, {"caption": caption}))
