"""AutoencoderKL, the VAE of image models: latents of the plain and sd-scripts layouts."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import torch
from diffusers import AutoencoderKL, AutoencoderKLFlux2

from latentmake.base.errors import ModelError
from latentmake.config.weights import Weights
from latentmake.encode.encoders.device import DTYPES, compute_dtype, download, stacked, upload
from latentmake.encode.encoders.local_state import State, load_network, place
from latentmake.encode.encoders.sdscripts import latents_arrays
from latentmake.encode.reading import Encoded, Loaded, Named, Sample, results
from latentmake.layouts.names import LATENTS, plain_latents_metadata
from latentmake.models.checkpoints import vae_config
from latentmake.models.files import network_config
from latentmake.models.parameterization import scale_of
from latentmake.models.tensors import FLUX2_VAE, STATISTICS, vae_layer
from latentmake.plan.orders import Order

TILE = 512
"""Side of a tile in pixels. The VAE's `sample_size` is not used, because single files lack it."""


def load_vae(
    weights: Weights, device: torch.device, dtype: torch.dtype, *, decoder: bool = True
) -> AutoencoderKL:
    """Load a VAE; float16 becomes float32 if its configuration sets `force_upcast`.

    SD 1.x and 2.x lack that key and stay in float16; the value True that diffusers fills in is
    ignored. A file without a configuration may be SDXL's VAE, which overflows in float16, so it
    becomes float32.

    Raises:
        ModelError: the weights are missing, damaged, or of another network.
    """
    config: dict[str, Any] = {}
    with suppress(ModelError):  # the loader raises it again, with the name of the network
        config = network_config(weights) or {}
    statistics = config.get("_class_name") == FLUX2_VAE
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
    if dtype == torch.float16 and _own_config(vae).get("force_upcast"):
        dtype = torch.float32
    if not decoder:
        vae.decoder = vae.post_quant_conv = None  # more than half of the memory
    place(vae, device, dtype)
    return vae


def tile(vae: AutoencoderKL) -> None:
    """Let a VAE encode larger images in overlapping tiles, and blend their latents."""
    vae.enable_tiling()
    vae.tile_sample_min_size = TILE
    vae.tile_latent_min_size = TILE >> (len(vae.config.block_out_channels) - 1)


def _converted(state: State, *, statistics: bool) -> State:
    """Give weights the names of diffusers, and drop weights of other parts of a checkpoint.

    `statistics` keeps FLUX.2's latent statistics. Only its class needs them; neither encoding nor
    decoding reads them.
    """
    prefix = "first_stage_model."
    state = {
        name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)
    } or state
    own = {name: state[name] for name in state if name.startswith(STATISTICS) and statistics}
    state = {
        vae_layer(name): value for name, value in state.items() if not name.startswith(STATISTICS)
    }
    if any(name.startswith("encoder.down.") for name in state):
        from diffusers.loaders.single_file_utils import convert_ldm_vae_checkpoint

        state = convert_ldm_vae_checkpoint(state, _inferred(state))
    # In older files, the attention projections are 1 x 1 convolutions.
    return {
        name: value.flatten(1) if value.dim() > 2 and "attentions." in name else value
        for name, value in (state | own).items()
    }


def _inferred(state: State) -> dict[str, Any]:
    shapes = {name: tuple(value.shape) for name, value in state.items()}
    return {**vae_config(shapes), "force_upcast": True}


def _own_config(vae: AutoencoderKL) -> dict[str, Any]:
    """Return the configuration of a VAE without the defaults that diffusers fills in."""
    filled_in = vae.config.get("_use_default_values", ())
    return {key: value for key, value in vae.config.items() if key not in filled_in}


@torch.inference_mode()
def encode_images(
    vae: AutoencoderKL, pixels: torch.Tensor, *, seeds: list[int] | None = None
) -> torch.Tensor:
    """Encode images to unscaled latents.

    Args:
        vae: VAE with its encoder.
        pixels: [N, H, W, 3], 0 to 255, uint8, on any device.
        seeds: seed of each image's noise, to sample from the posteriors; None: take their means.

    Returns:
        [N, C, H / factor, W / factor], float32, on the VAE's device.
    """
    weight = next(vae.parameters())  # `vae.device` walks all layers, which takes a millisecond
    images = upload(pixels, weight.device).permute(0, 3, 1, 2).to(torch.float32) / 127.5 - 1.0
    # `contiguous`: the channels-last order costs a GPU 30% of its speed (tests/bench/README.md),
    # and a CPU accuracy.
    posterior = vae.encode(images.contiguous().to(weight.dtype)).latent_dist
    latents: torch.Tensor = posterior.mean.float()
    if seeds is None:
        return latents
    # The CPU's generator makes the noise, so that it is the same on every device.
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    shape = latents.shape[1:]
    noise = torch.stack([torch.randn(shape, generator=generator) for generator in generators])
    deviation: torch.Tensor = posterior.std.float()
    return latents + deviation * upload(noise, latents.device)


def latents(order: Order, device: torch.device, say: Callable[[str], None]) -> Loaded:
    """Load the VAE of an order."""
    model, arrays = order.model_settings, order.layout.npz
    name = model.vae_dtype or model.dtype
    vae = load_vae(model.vae, device, compute_dtype(device, name, say), decoder=False)
    if model.vae_tiling:
        tile(vae)
    scale, shift, _ = scale_of(model, _own_config(vae) if model.vae.hub else None)
    file_shift, file_scale = model.spec.npz_scale if arrays else (0.0, 1.0)
    seed, draws = model.posterior_seed, model.posterior == "sample"
    mirrored = (False, True) if arrays and order.dataset_settings.flip_aug else (False,)

    def named(sample: Sample, *rows: torch.Tensor) -> Named:
        if arrays:
            return latents_arrays(model, sample, rows), {}
        height, width = sample.shape[:2]
        metadata = plain_latents_metadata(scale, shift, sample.original, (width, height))
        return {LATENTS: rows[0]}, metadata

    def encode(samples: list[Sample]) -> Encoded:
        pixels, batches = stacked([np.asarray(sample.content) for sample in samples], device), []
        for flip in mirrored:
            seeds = None
            if draws:  # only from the seed and the key, so the noise does not depend on the batch
                seeds = [(int(sample.key[:15], 16) + seed + flip) % 2**63 for sample in samples]
            encoded = encode_images(vae, pixels.flip(2) if flip else pixels, seeds=seeds)
            encoded = (encoded - file_shift) * file_scale
            batches.append(encoded if arrays else encoded.to(DTYPES[name]))
        return results(samples, download(batches), named)

    return Loaded(encode)
