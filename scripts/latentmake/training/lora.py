"""A LoRA of peft in a network, as the file that diffusers' pipelines read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from diffusers.loaders.lora_base import LORA_ADAPTER_METADATA_KEY
from peft.utils import get_peft_model_state_dict

from latentmake.files import cachefile

ADAPTER = "default"
"""Name of the LoRA in its network: peft's own."""


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
