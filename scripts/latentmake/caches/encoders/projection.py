"""Projection of embeddings from a text encoder's width to that of a UNet's cross-attention.

Usually one linear layer, kept as `model.safetensors` (`weight` and, if any, `bias`) beside a small
`config.json`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from latentmake.caches.encoders.local_state import read_weights
from latentmake.config.weights import TextWeights
from latentmake.errors import ModelError, first_line
from latentmake.files import atomic, cachefile
from latentmake.models.files import projection_file


def load_projection(path: str) -> torch.nn.Linear:
    """Load a projection in float32: a folder, or one .safetensors file.

    Raises:
        ModelError: it is missing, or holds something other than one linear layer.
    """
    state = read_weights(file := projection_file(path))
    weight, *bias = sorted(state.values(), key=lambda each: -each.dim()) or [torch.empty(0)]
    if weight.dim() != 2 or [each.shape for each in bias] not in ([], [weight.shape[:1]]):
        some = ", ".join(sorted(state)[:4])
        what = f"holds {len(state)} tensors ({some}), not one linear layer"
        hint = "name the file of a linear projection; one with code of its own needs "
        hint += "`trust_remote_code: true`, as a text encoder's `projection`"
        raise ModelError(what, where=file, hint=hint)
    layer = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=bool(bias))
    layer.load_state_dict(dict(zip(("weight", "bias"), (weight, *bias), strict=False)))
    return layer


def write_projection(layer: torch.nn.Linear, folder: Path) -> None:
    """Write a projection, each file atomically.

    Raises:
        StorageError: the disk is full or cannot be written.
    """
    config = {
        "_class_name": "Linear",
        "in_features": layer.in_features,
        "out_features": layer.out_features,
    }
    tensors = {name: each.detach().cpu().float() for name, each in layer.named_parameters()}
    atomic.write(folder / "model.safetensors", cachefile.serialize(tensors, {}))
    atomic.write(folder / "config.json", (json.dumps(config, indent=2) + "\n").encode())


def text_projection(weights: TextWeights) -> torch.nn.Module | None:
    """Load a text encoder's projection for inference, if it has one.

    A pipeline with a projection class of its own is loaded with the Python files in its folder, and
    only if the configuration trusts them by name.

    Raises:
        ModelError: it is missing, or cannot be loaded.
    """
    if weights.projection is None:
        return None
    layer: torch.nn.Module
    if not weights.trust_remote_code:
        layer = load_projection(weights.projection)
        return layer.eval().requires_grad_(False)
    import diffusers  # seconds of import, for this alone

    loader: Any = diffusers.DiffusionPipeline  # which has no types
    folder = Path(weights.projection)
    try:
        index = json.loads((folder / "model_index.json").read_bytes())
        names = [name for name, each in index.items() if isinstance(each, list)]
        (name,) = (each for each in names if "projection" in each)
        pipeline = loader.from_pretrained(
            str(folder),
            custom_pipeline=str(folder),
            trust_remote_code=True,
            local_files_only=True,
            dtype=torch.float32,
            **{each: None for each in names if each != name},
        )
        layer = getattr(pipeline, name)
        return layer.eval().requires_grad_(False)
    except Exception as error:  # code of others may fail in any way
        raise ModelError(
            f"its projection cannot be loaded ({first_line(error)})",
            where=folder,
            hint="name the folder of a diffusers pipeline with pipeline.py and its projection",
        ) from None
