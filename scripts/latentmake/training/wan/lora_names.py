"""Names of the files of a LoRA of Wan's network: one for each program that reads it."""

from __future__ import annotations

from typing import NamedTuple


class LoraNames(NamedTuple):
    """Names of the files of one network's LoRA.

    Attributes:
        diffusers: for `WanPipeline.load_lora_weights`.
        musubi: for musubi-tuner.
        comfyui: for ComfyUI.
    """

    diffusers: str = "pytorch_lora_weights.safetensors"
    musubi: str = "musubi.safetensors"
    comfyui: str = "comfyui.safetensors"


def lora_names(*, high_noise: bool = False) -> LoraNames:
    """Return the names for a network; those of Wan 2.2's for high noise have a prefix."""
    names = LoraNames()
    return LoraNames(*(f"high_noise_{name}" for name in names)) if high_noise else names
