"""AutoencoderKL, the VAE of image models: images to latents of the plain and sd-scripts layouts."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import torch
from diffusers import AutoencoderKL, AutoencoderKLFlux2

from latentmake.caches.encoders.device import DTYPES, compute_dtype, download, stacked, upload
from latentmake.caches.encoders.local_state import State, load_network, place
from latentmake.caches.encoders.sdscripts import latents_arrays
from latentmake.caches.inputs import Encoded, Loaded, Named, Sample, results
from latentmake.config.weights import Weights
from latentmake.errors import ModelError
from latentmake.layouts.tensors import LATENTS, plain_latents_metadata
from latentmake.models.checkpoints import vae_config
from latentmake.models.files import network_config
from latentmake.models.parameterization import scale_of
from latentmake.models.tensors import FLUX2_VAE, STATISTICS, vae_layer
from latentmake.plan.orders import Order

TILE = 512
"""Pixels a side of a tile. Not the `sample_size` of a configuration, which single files lack."""


def load_vae(
    weights: Weights, device: torch.device, dtype: torch.dtype, *, decoder: bool = True
) -> AutoencoderKL:
    """Load a VAE; float16 becomes float32 if its `force_upcast` asks for it; raises ModelError.

    A configuration that lacks the key, as SD 1.x's and 2.x's do, does not ask: diffusers fills in
    True. Of a file without a configuration nothing is known; SDXL's overflows in float16.
    """
    told: dict[str, Any] = {}
    with suppress(ModelError):  # the loader names it
        told = network_config(weights) or {}
    statistics = told.get("_class_name") == FLUX2_VAE
    vae: AutoencoderKL = load_network(
        weights,
        AutoencoderKLFlux2 if statistics else AutoencoderKL,
        "an AutoencoderKL",
        models=("AutoencoderKL", FLUX2_VAE),
        hint="name the folder of a VAE, with all its files",
        converted=partial(_converted, statistics=statistics),
        inferred=_inferred,
        foreign=re.escape(STATISTICS),
        original=False,
    )
    if dtype == torch.float16 and _told(vae).get("force_upcast"):
        dtype = torch.float32
    if not decoder:
        vae.decoder = vae.post_quant_conv = None  # more than half of the memory
    place(vae, device, dtype)
    return vae


def tile(vae: AutoencoderKL) -> None:
    """Encode larger images in overlapping tiles from now on, and blend their latents."""
    vae.enable_tiling()
    vae.tile_sample_min_size = TILE
    vae.tile_latent_min_size = TILE >> (len(vae.config.block_out_channels) - 1)


def _converted(state: State, *, statistics: bool) -> State:
    """Name weights as diffusers does, and drop those of other parts of a checkpoint.

    Those of FLUX.2's `statistics` stay for its class alone, which no encoding or decoding reads.
    """
    prefix = "first_stage_model."
    state = {x.removeprefix(prefix): state[x] for x in state if x.startswith(prefix)} or state
    own = {name: state[name] for name in state if name.startswith(STATISTICS) and statistics}
    state = {vae_layer(x): state[x] for x in state if not x.startswith(STATISTICS)}
    if any(name.startswith("encoder.down.") for name in state):
        from diffusers.loaders.single_file_utils import convert_ldm_vae_checkpoint

        state = convert_ldm_vae_checkpoint(state, _inferred(state))
    # Attention projections are 1 x 1 convolutions in older files.
    return {
        name: value.flatten(1) if value.dim() > 2 and "attentions." in name else value
        for name, value in (state | own).items()
    }


def _inferred(state: State) -> dict[str, Any]:
    shapes = {name: tuple(value.shape) for name, value in state.items()}
    return {**vae_config(shapes), "force_upcast": True}


def _told(vae: AutoencoderKL) -> dict[str, Any]:
    """Return the configuration of a VAE without what diffusers fills in."""
    filled_in = vae.config.get("_use_default_values", ())
    return {key: value for key, value in vae.config.items() if key not in filled_in}


@torch.inference_mode()
def encode_images(
    vae: AutoencoderKL, pixels: torch.Tensor, *, seeds: list[int] | None = None
) -> torch.Tensor:
    """Encode images to unscaled latents.

    Args:
        vae: to encode with.
        pixels: [N, H, W, 3], 0 to 255, uint8, on any device.
        seeds: of the noise, to sample each posterior; None: its mean.

    Returns:
        [N, C, H / factor, W / factor], float32, on the VAE's device.
    """
    weight = next(vae.parameters())  # the network itself asks all its layers, for a millisecond
    images = upload(pixels, weight.device).permute(0, 3, 1, 2).to(torch.float32) / 127.5 - 1.0
    # Channels side by side in memory cost a GPU 30% of its speed (tests/bench/README.md), and a CPU
    # its accuracy.
    posterior = vae.encode(images.contiguous().to(weight.dtype)).latent_dist
    latents: torch.Tensor = posterior.mean.float()
    if seeds is None:
        return latents
    # From the CPU's generator, so that noise is the same on every device.
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    noise = torch.stack([torch.randn(latents.shape[1:], generator=each) for each in generators])
    deviation: torch.Tensor = posterior.std.float()
    return latents + deviation * upload(noise, latents.device)


def latents(order: Order, device: torch.device, say: Callable[[str], None]) -> Loaded:
    """Load the VAE of an order."""
    model, arrays = order.model_settings, order.layout.npz
    name = model.vae_dtype or model.dtype
    vae = load_vae(model.vae, device, compute_dtype(device, name, say), decoder=False)
    if model.vae_tiling:
        tile(vae)
    scale, shift, _ = scale_of(model, _told(vae) if model.vae.hub else None)
    own_shift, own_scale = (arrays and model.spec.scale) or (0.0, 1.0)  # of latents in the file
    seed, draws = model.posterior_seed, model.posterior == "sample"
    mirrored = (False, True) if arrays and order.dataset_settings.flip_aug else (False,)

    def named(sample: Sample, *rows: torch.Tensor) -> Named:
        if arrays:
            return latents_arrays(model, sample, rows), {}
        height, width = sample.shape[:2]
        told = plain_latents_metadata(scale, shift, sample.original, (width, height))
        return {LATENTS: rows[0]}, told

    def encode(samples: list[Sample]) -> Encoded:
        pixels, made = stacked([np.asarray(sample.content) for sample in samples], device), []
        for flip in mirrored:
            seeds = None
            if draws:  # from the seed and the key alone: no neighbour changes an item's noise
                seeds = [(int(each.key[:15], 16) + seed + flip) % 2**63 for each in samples]
            found = encode_images(vae, pixels.flip(2) if flip else pixels, seeds=seeds)
            found = (found - own_shift) * own_scale
            made.append(found if arrays else found.to(DTYPES[name]))
        return results(samples, download(made), named)

    return Loaded(encode)
