"""Arrays of sd-scripts' cache files.

numpy has no bfloat16, so it becomes float32, as in sd-scripts.
Source: sd-scripts, `save_latents_to_disk` of library/strategy_base.py, and `cache_batch_outputs` of
library/strategy_sdxl.py, strategy_sd3.py and strategy_flux.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from latentmake.config.models import Model
from latentmake.encode.reading import Sample
from latentmake.formats import npz
from latentmake.geometry.buckets import Size, crop_ltrb
from latentmake.layouts.names import array_name, encoder_name

Arrays = dict[str, NDArray[Any]]


def latents_arrays(
    model: Model, sample: Sample, rows: Sequence[torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return the arrays of a latents file.

    `rows` are the latents, then the latents of the mirrored image if the dataset flips.
    """
    crop = crop_ltrb(Size(sample.shape[1], sample.shape[0]), Size(*sample.original))
    arrays = dict(zip(("latents", "latents_flipped"), rows, strict=False)) | {
        "original_size": torch.tensor(sample.original),
        "crop_ltrb": torch.tensor(crop, dtype=torch.float64),
    }
    if sample.alpha is not None:
        arrays["alpha_mask"] = torch.from_numpy(sample.alpha.astype(np.float32) / 255.0)
    height, width = rows[0].shape[1:]
    return {array_name(name, model.spec, height, width): array for name, array in arrays.items()}


def file_bytes(
    kind: str, model: Model, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]
) -> bytes:
    """Return the bytes of a cache file of kind `latents` or `text`."""
    arrays = text_arrays(model, tensors) if kind == "text" else _numpy(tensors)
    return npz.serialize(arrays, metadata)


def text_arrays(model: Model, tensors: Mapping[str, torch.Tensor]) -> Arrays:
    """Return the arrays of a text file.

    Args:
        model: a model of SDXL, SD 3 or Flux, or of an architecture that sd-scripts encodes.
        tensors: `{encoder}.hidden_state` [T, D], `{encoder}.pooled` [D] and
            `{encoder}.attention_mask` [T] of each text encoder in order; T5's tensors are padded.

    Returns:
        SDXL: hidden_state1 [T, 768], hidden_state2 [T, 1280], pool2 [1280]. SD 3: lg_out
        [77, 2048], lg_pooled [2048], t5_out [T, 4096], three masks [77], [77] and [T], and whether
        the masks were applied. Flux: l_pooled [768], t5_out, txt_ids [T, 3] (all zeros), the mask
        of T5, and whether it was applied.
    """
    named = _numpy(tensors)
    if not model.spec.encodes:
        return named  # sd-scripts' own arrays
    arrays: Arrays = {}
    for name, (part, numbers) in model.spec.strategies.text_arrays.items():
        encoders = [encoder_name(number) for number in numbers]
        if part == "applied":
            arrays[name] = np.array(getattr(model, name))
        elif part == "places":
            tokens = len(named[f"{encoders[0]}.hidden_state"])
            arrays[name] = np.zeros((tokens, 3), np.float32)
        else:
            several = [named[f"{encoder}.{part}"] for encoder in encoders]
            arrays[name] = np.concatenate(several, axis=-1)
            if part == "attention_mask":
                arrays[name] = arrays[name].astype(np.int64)
    return arrays


def _numpy(tensors: Mapping[str, torch.Tensor]) -> Arrays:
    return {
        name: (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy(force=True)
        for name, tensor in tensors.items()
    }
