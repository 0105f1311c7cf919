"""Condition of image-to-video, made of a picture."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from latentmake.caches.encoders.clip_vision import load_clip_vision
from latentmake.caches.encoders.wan_vae import load_wan_vae
from latentmake.caches.pixels.plain import decode
from latentmake.caches.pixels.scaling import cover
from latentmake.config.datasets import Dataset
from latentmake.errors import SourceError
from latentmake.geometry.buckets import Size
from latentmake.training.generation import GenerationOrder
from latentmake.training.wan.sampling import Condition

_READING = Dataset(path=".")  # upright, transparency on white


def condition_of(order: GenerationOrder, device: torch.device) -> Condition | None:
    """Return the condition of an order's clips; None where it names no picture.

    The picture covers the clip and is cut around its centre. The encoders are loaded for it alone.

    Raises:
        SourceError: the picture is gone, damaged, or too narrow.
        ModelError: an encoder is missing or damaged.
    """
    if order.image is None:
        return None
    path, model = order.image[0], order.model
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise SourceError(
            f"cannot be read ({error.strerror})",
            where=path,
            hint="check that the file exists and is readable",
        ) from None
    first = cover(decode(data, path, _READING), Size(order.width, order.height), path=path)
    frame = torch.from_numpy(np.ascontiguousarray(first))[None]
    pixels = frame.new_zeros(1, order.frames, *frame.shape[1:])
    pixels[:, 0] = frame
    vae = load_wan_vae(model.vae, device, torch.float32, tiled=model.vae_cache_cpu)
    latents = vae.encode_first_frame(pixels, torch.float32)[0].cpu()
    del vae
    if model.clip is None:
        return Condition(latents)
    half = torch.float32 if device.type == "cpu" else torch.float16
    seen = load_clip_vision(model.clip, device, half).encode(frame)[0]
    return Condition(latents, seen.float().cpu())
