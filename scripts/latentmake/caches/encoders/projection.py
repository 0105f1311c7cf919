"""The projection that brings a text encoder's width to that of a UNet's cross-attention.

One linear layer, [in_features] -> [out_features], kept as `model.safetensors` (`weight` and, if
any, `bias`) beside a small `config.json`.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from latentmake.errors import ModelError
from latentmake.files import atomic, cachefile
from latentmake.models.files import projection_file

__all__ = ["load_projection", "write_projection"]


def load_projection(path: str) -> torch.nn.Linear:
    """Load a projection in float32: a folder, or one .safetensors file.

    Raises:
        ModelError: it is missing, or holds something other than one linear layer.
    """
    file = projection_file(path)
    try:
        state = load_file(file)
    except (OSError, SafetensorError) as error:
        what = f"cannot be read ({error})"
        raise ModelError(what, where=file, mend="copy the projection again") from None
    weights = [name for name, each in state.items() if each.dim() == 2]
    biases = [name for name, each in state.items() if each.dim() == 1]
    if len(weights) != 1 or len(biases) > 1 or len(state) != 1 + len(biases):
        names = ", ".join(sorted(state)[:4])
        what = f"holds {len(state)} tensors ({names}), not one linear layer"
        hint = "name the file of a linear projection; one with code of its own needs "
        hint += "`trust_remote_code: true`, as a text encoder's `projection`"
        raise ModelError(what, where=file, mend=hint)
    weight = state[weights[0]].float()
    if biases and state[biases[0]].shape != weight.shape[:1]:
        what = f"`{biases[0]}` does not fit `{weights[0]}`"
        raise ModelError(what, where=file, mend="copy it again")
    layer = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=bool(biases))
    with torch.no_grad():
        layer.weight.copy_(weight)
        if biases:
            layer.bias.copy_(state[biases[0]].float())
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
