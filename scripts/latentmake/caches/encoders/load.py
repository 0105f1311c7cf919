"""From a work order to the encoder that carries it out, with tensors named as the layout asks."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from latentmake import layouts
from latentmake.caches.encoders.device import DTYPES, compute_dtype, pick_device
from latentmake.caches.encoders.import_guard import without
from latentmake.caches.job import Loaded, Sample
from latentmake.config import Model
from latentmake.layouts import plain
from latentmake.models.files import original_files, weights_files
from latentmake.models.tokenizers import CutCaptions
from latentmake.plan.orders import WorkOrder

__all__ = ["encoder"]

_REST = 1_000_000_000  # bytes that encoding takes besides the weights, at the least
_ON_A_GPU = {  # samples at once; whether it is Wan, and the kind
    (False, "latents"): 8,
    (False, "text"): 32,
    (True, "latents"): 4,
    (True, "text"): 16,
}


def encoder(
    order: WorkOrder,
    *,
    threads: int,
    batch_size: int,
    say: Callable[[str], None],
    alone: bool = False,
) -> Loaded:
    """Load what an order needs.

    Args:
        order: names the model.
        threads: for computing on a CPU.
        batch_size: samples at once; 0: one on a CPU, more elsewhere.
        say: told of the device.
        alone: whether this process does nothing else, so that it can do without what others need.

    Raises:
        ModelError: the model is missing or incomplete.
    """
    torch.set_num_threads(threads)
    device = pick_device()
    model = order.model_settings
    is_wan = model.spec.wan
    size = batch_size or (1 if device.type == "cpu" else _ON_A_GPU[is_wan, order.kind])
    say(f"encoding on {device.type}, {size} at once")
    if line := _too_little_memory(model, order.kind, device):
        say(line)
    unneeded: tuple[str, ...] = ()
    if alone and order.kind == "latents" and model.clip is None:
        # Single files of Wan's VAE are loaded with accelerate's help.
        unneeded = ("transformers", "peft") if is_wan else ("transformers", "peft", "accelerate")
    with without(*unneeded):
        if is_wan:
            from latentmake.caches.encoders import wan

            load_wan = wan.latents if order.kind == "latents" else wan.text
            return load_wan(model, device, size, say)
        if layouts.of(model.layout_name).npz and order.kind == "latents":
            from latentmake.caches.encoders import sdscripts

            return Loaded(sdscripts.latents(model, order.dataset_settings, device, say), size)
        load = _latents if order.kind == "latents" else _text
        return load(model, device, size, say)


def _too_little_memory(model: Model, kind: str, device: torch.device) -> str | None:
    """Return a line where a GPU has less memory free than the files of the weights are large."""
    if device.type != "cuda":
        return None
    places = (
        list(model.text) if kind == "text" else [model.vae, *([model.clip] if model.clip else [])]
    )
    local = [place for place in places if place.path is not None]
    find = original_files if model.spec.wan else weights_files
    size = sum(file.stat().st_size for place in local for file in find(place))
    free, total = torch.cuda.mem_get_info(device)
    if free >= size + _REST:
        return None
    return (
        f"the GPU has {free / 1e9:.1f} of {total / 1e9:.1f} GB free, and the weights alone take "
        f"about {size / 1e9:.1f}: end other programs on it if memory runs out"
    )


def _latents(model: Model, device: torch.device, size: int, say: Callable[[str], None]) -> Loaded:
    from diffusers.utils import logging  # seconds of import that a text job can do without

    from latentmake.caches.encoders.vae import encode_images, load_vae

    logging.set_verbosity_error()
    stored = model.vae_dtype or model.dtype
    vae = load_vae(model.vae, device, compute_dtype(device, stored, say))
    scale = float(vae.config.get("scaling_factor") or 1.0)
    shift = float(vae.config.get("shift_factor") or 0.0)

    def encode(samples: list[Sample]) -> list[tuple[dict[str, torch.Tensor], dict[str, str]]]:
        pixels = torch.from_numpy(np.stack([np.asarray(sample.content) for sample in samples]))
        seeds = None
        if model.posterior == "sample":
            # From the seed and the key alone: no neighbour changes an item's noise.
            seeds = [(int(each.key[:15], 16) + model.posterior_seed) % 2**63 for each in samples]
        latents = encode_images(vae, pixels, seeds=seeds).to(DTYPES[stored])
        height, width = pixels.shape[1:3]
        return [
            (
                {plain.LATENTS: row.clone()},
                plain.latents_metadata(scale, shift, sample.original, (width, height)),
            )
            for sample, row in zip(samples, latents, strict=True)
        ]

    return Loaded(encode, size)


def _text(model: Model, device: torch.device, size: int, say: Callable[[str], None]) -> Loaded:
    from transformers.utils import logging

    from latentmake.caches.encoders.texts import TextEncoders

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    stored = DTYPES[model.caption_dtype]
    computed = compute_dtype(device, model.caption_dtype, say)
    encoders = TextEncoders(model, device, computed)
    cut = CutCaptions()

    def encode(samples: list[Sample]) -> list[tuple[dict[str, torch.Tensor], dict[str, str]]]:
        captions = [str(sample.content) for sample in samples]
        found = encoders.encode(captions)
        for sample, caption in zip(samples, captions, strict=True):
            for name, limit in encoders.cutting(caption):
                cut.note(name, limit, sample.key, sample.item.place)
        return [
            (
                {
                    name: value.to(stored) if value.is_floating_point() else value
                    for name, value in tensors.items()
                },
                {"caption": caption},
            )
            for tensors, caption in zip(found, captions, strict=True)
        ]

    return Loaded(encode, size, remarks=cut.lines)
