"""Names of the files of a trained UNet."""

from __future__ import annotations

__all__ = ["PROJECTION_FOLDER", "UNET_FOLDER", "UNET_WEIGHTS"]

UNET_FOLDER = "unet"
UNET_WEIGHTS = "diffusion_pytorch_model.safetensors"  # diffusers' own name
PROJECTION_FOLDER = "text_projection"
