"""Named parts of a UNet, to be trained alone or begun anew.

A changed VAE or text encoder concerns some layers only: norms and the first and last convolutions
(other latents), cross-attention (other embeddings).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from latentmake.models.checks import part_of

__all__ = ["names_of", "reinitialize"]

_NORMS = (torch.nn.GroupNorm, torch.nn.LayerNorm)


def names_of(unet: Any, parts: Iterable[str]) -> set[str]:
    """Return the names of all parameters of some parts.

    Args:
        unet: a UNet2DConditionModel.
        parts: `unet`, `conv_in`, `conv_out`, `time_embedding`, `mid_block`, `down_blocks`,
            `up_blocks`, one of the latter (`up_blocks.1`), `norms`, `attention`,
            `cross_attention`, or of that the queries and keys (`cross_attention_qk`) or the
            output (`cross_attention_out`).
    """
    names = [name for name, _ in unet.named_parameters()]
    found: set[str] = set()
    for part in parts:
        if part == "norms":
            own = {
                f"{path}.{name}"
                for path, module in unet.named_modules()
                if isinstance(module, _NORMS)
                for name, _ in module.named_parameters(recurse=False)
            }
        else:
            own = part_of(part, names)
        found |= own
    return found


def reinitialize(unet: Any, names: set[str]) -> None:
    """Draw the weights of some parameters anew, as torch does for new layers.

    Drawn from torch's global generator, layer by layer in the network's order.

    Args:
        unet: changed in place.
        names: of parameters; a layer with one of them begins anew with all of its own.
    """
    for path, module in unet.named_modules():
        own = {f"{path}.{name}" for name, _ in module.named_parameters(recurse=False)}
        if own & names:
            module.reset_parameters()
