"""Encoders of Wan models, with tensors and metadata as musubi-tuner's."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from latentmake.caches.encoders.device import DTYPES, compute_dtype, download, stacked
from latentmake.caches.inputs import Encoded, Loaded, Named, Sample, results
from latentmake.layouts import layout
from latentmake.plan.orders import Order


def latents(order: Order, device: torch.device, say: Callable[[str], None]) -> Loaded:
    """Load the VAE, and for Wan 2.1 image-to-video the CLIP image encoder."""
    from latentmake.caches.encoders.wan_vae import WanVae, load_wan_vae

    model = order.model_settings
    name = model.vae_dtype or model.dtype
    stored = DTYPES[name]
    # As musubi-tuner's script does; in float32 a CPU takes 1.7 times as long.
    computed = compute_dtype(device, name, say, cpu_bfloat16=True)
    vae = load_wan_vae(model.vae, device, computed, tiled=model.vae_cache_cpu)
    clip = None
    if model.clip is not None:
        from latentmake.caches.encoders.clip_vision import load_clip_vision

        half = torch.float32 if device.type == "cpu" else torch.float16
        clip = load_clip_vision(model.clip, device, half)

    def frames_of(arrays: list[NDArray[np.uint8]]) -> torch.Tensor:
        """Return images, as clips of one frame, or clips: [N, F, H, W, 3]."""
        found = stacked(arrays, device)
        return found if found.dim() == 5 else found[:, None]

    def encode(samples: list[Sample], vae: WanVae = vae) -> Encoded:
        pixels = frames_of([np.asarray(sample.content) for sample in samples])
        made = {"latents": vae.encode(pixels, stored)}
        if model.image_to_video:
            made["latents_image"] = vae.encode_first_frame(pixels, stored)
        if samples[0].control is not None:
            control = frames_of([np.asarray(sample.control) for sample in samples])
            made["latents_control"] = vae.encode(control, stored)
        rows = {
            layout.latents_key(kind, tuple(x.shape[1:]), name): x.to(stored)
            for kind, x in made.items()
        }
        if clip is not None:
            rows[f"clip_{name}"] = clip.encode(pixels[:, 0], stored)
        names, (frames, height, width) = [*rows], pixels.shape[1:4]

        def named(sample: Sample, *tensors: torch.Tensor) -> Named:
            size = (width, height, frames) if sample.clip else (*sample.original, None)
            return dict(zip(names, tensors, strict=True)), layout.musubi_latents_metadata(*size)

        return results(samples, download([*rows.values()]), named)

    return Loaded(encode, frugal=partial(encode, vae=vae.frugal()))


def text(order: Order, device: torch.device, say: Callable[[str], None]) -> Loaded:
    """Load umT5."""
    from latentmake.caches.encoders.text import TextEncoders, load_umt5

    def named(caption: str, tensors: dict[str, torch.Tensor]) -> Named:
        (embedding,) = tensors.values()
        return {"varlen_t5_bfloat16": embedding}, layout.text_metadata(caption)

    model, computed = order.model_settings, compute_dtype(device, "bfloat16", say)
    encoder = load_umt5(model.text[0], device, computed, fp8=model.fp8_t5)
    return TextEncoders({"umT5": encoder}).loaded(named)
