"""A LoRA of peft in a network, as the file that diffusers' pipelines read."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from diffusers.loaders.lora_base import LORA_ADAPTER_METADATA_KEY
from peft import LoraConfig
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import get_peft_model_state_dict

from latentmake.files import cachefile

ADAPTER = "default"
"""Name of the LoRA in its network: peft's own."""

_MATRICES = {"lora_A": "lora_down", "lora_B": "lora_up"}  # peft's names, and kohya's


def add_adapter(
    network: Any,
    *,
    rank: int,
    alpha: float | None,
    target_modules: Sequence[str],
    autocast: bool,
) -> None:
    """Freeze a network and add a float32 LoRA to it, by peft; it changes nothing yet.

    New weights are drawn from torch's global generator.

    Args:
        network: changed in place.
        rank: of the LoRA.
        alpha: the LoRA's output is multiplied by alpha / rank; None for the rank.
        target_modules: layers, by their names or the ends of these.
        autocast: whether the network is called under autocast alone, which casts what layers get:
            peft's own cast to float32 then changes no bit, and takes memory and time.

    Raises:
        ValueError: peft puts no LoRA on a layer of this kind.
    """
    network.requires_grad_(False)
    network.add_adapter(
        LoraConfig(
            r=rank,
            lora_alpha=rank if alpha is None else alpha,
            init_lora_weights="gaussian",
            target_modules=list(target_modules),
        )
    )
    if autocast:
        for module in network.modules():
            if isinstance(module, BaseTunerLayer):
                module.cast_input_dtype_enabled = False
    for parameter in network.parameters():
        if parameter.requires_grad:  # the optimizer needs small differences
            parameter.data = parameter.data.float()


def lora_tensors(network: Any) -> dict[str, torch.Tensor]:
    """Return the LoRA's own tensors, not copies, by peft's names."""
    found: dict[str, torch.Tensor] = get_peft_model_state_dict(network)
    return found


def lora_bytes(network: Any, prefix: str, tensors: Mapping[str, torch.Tensor]) -> bytes:
    """Return the file that a pipeline's `load_lora_weights` reads.

    Names and metadata (without which a loader takes the rank for alpha) are those of diffusers'
    `LoraBaseMixin._save_lora_weights`.

    Args:
        network: with a LoRA of peft.
        prefix: the pipeline's name for the network, `unet` or `transformer`.
        tensors: of the LoRA, by their names in the file without the prefix.
    """
    named = {f"{prefix}.{name}": each.detach().cpu().float() for name, each in tensors.items()}
    config = network.peft_config[ADAPTER]
    # What differs from peft's defaults, and no more: another version knows other fields.
    described = {
        f"{prefix}.r": config.r,
        f"{prefix}.lora_alpha": config.lora_alpha,
        f"{prefix}.target_modules": sorted(config.target_modules),
    }
    metadata = {
        "format": "pt",
        LORA_ADAPTER_METADATA_KEY: json.dumps(described, indent=2, sort_keys=True),
    }
    return cachefile.serialize(named, metadata)


def kohya_tensors(
    tensors: Mapping[str, torch.Tensor], alpha: float, places: Mapping[str, str]
) -> dict[str, torch.Tensor]:
    """Return a LoRA in the names of kohya's scripts and those that follow them.

    Args:
        tensors: of the LoRA, by peft's names.
        alpha: of the LoRA.
        places: peft's name of a layer -> its name there.
    """
    named: dict[str, torch.Tensor] = {}
    for name, value in tensors.items():
        layer, matrix, _ = name.rsplit(".", 2)  # mid_block.attentions.0.proj_in, lora_A, weight
        named[f"{places[layer]}.{_MATRICES[matrix]}.weight"] = value.detach().cpu().float()
        named[f"{places[layer]}.alpha"] = torch.tensor(alpha)
    return named


def layers_of(tensors: Mapping[str, object]) -> set[str]:
    """Return the layers of a LoRA, of the names of its tensors."""
    return {name.rsplit(".", 2)[0] for name in tensors}
