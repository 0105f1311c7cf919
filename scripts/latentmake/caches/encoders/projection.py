"""Projection of embeddings before they are cached.

A linear layer's weights need no code. A pipeline with a projection class of its own is loaded with
the Python files in its folder, and only if the configuration trusts them by name.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from latentmake.config import TextWeights
from latentmake.errors import ModelError, first_line
from latentmake.models.projection import load_projection

__all__ = ["load_text_projection"]


def load_text_projection(weights: TextWeights) -> torch.nn.Module | None:
    """Load a text encoder's projection for inference, if it has one.

    Raises:
        ModelError: it is missing, or cannot be loaded.
    """
    if weights.projection is None:
        return None
    if not weights.trust_remote_code:
        return load_projection(weights.projection).eval().requires_grad_(False)
    import diffusers  # seconds of import, for this alone

    loader: Any = diffusers.DiffusionPipeline  # which has no types
    folder = Path(weights.projection)
    hint = "name the folder of a diffusers pipeline with pipeline.py and its projection"
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
    except Exception as error:  # code of others may fail in any way
        raise ModelError(
            f"its projection cannot be loaded ({first_line(error)})", where=folder, mend=hint
        ) from None
    if not isinstance(layer, torch.nn.Module):
        raise ModelError(f"its `{name}` is not a network", where=folder, mend=hint)
    return layer.eval().requires_grad_(False)
