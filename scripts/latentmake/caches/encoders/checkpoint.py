"""Weights of a part of a complete checkpoint, in the names of diffusers and transformers.

The names are converted by diffusers' own functions for single files.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from latentmake.caches.encoders.local_state import State
from latentmake.config.weights import Weights
from latentmake.models.checkpoints import part_of, prefix_of


def text_state(weights: Weights, config: Any, state: State) -> State:
    """Return the weights of a text encoder: of a checkpoint its part's, else all as they are.

    Args:
        weights: where they lie.
        config: of the network.
        state: all tensors of the file.
    """
    part = part_of(weights)
    prefix = part and prefix_of(part, state)
    if not prefix:
        return state
    if not prefix.endswith("model."):
        return {x.removeprefix(prefix): state[x] for x in state if x.startswith(prefix)}
    from diffusers.loaders.single_file_utils import convert_open_clip_checkpoint

    network = SimpleNamespace(config=config)
    converted: State = convert_open_clip_checkpoint(network, state, prefix=prefix)
    return converted


def unet_state(config: dict[str, Any], state: State) -> State:
    """Return the weights of a checkpoint's UNet.

    Args:
        config: of the network.
        state: all tensors of the file.
    """
    from diffusers.loaders.single_file_utils import convert_ldm_unet_checkpoint

    own = {name: value for name, value in state.items() if name.startswith("model.diffusion_model")}
    converted: State = convert_ldm_unet_checkpoint(own, config)
    return converted
