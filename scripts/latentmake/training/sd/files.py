"""Names of the files of a trained UNet."""

from __future__ import annotations

UNET_FOLDER = "unet"
UNET_WEIGHTS = "diffusion_pytorch_model.safetensors"  # diffusers' own name
PROJECTION_FOLDER = "text_projection"
KOHYA_WEIGHTS = "kohya.safetensors"
"""The LoRA once more, for A1111, Forge, ComfyUI and sd-scripts."""
