"""Stable Diffusion's networks of any width, with random weights by torch's global generator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from diffusers import AutoencoderKL, UNet2DConditionModel


def vae(channels: Sequence[int] = (8, 8, 8, 8), **changes: Any) -> AutoencoderKL:
    """Return a VAE; each number of channels but the last stands for a halving of the sides."""
    settings = {"layers_per_block": 1, "norm_num_groups": 4, **changes}
    return AutoencoderKL(
        block_out_channels=tuple(channels),
        down_block_types=("DownEncoderBlock2D",) * len(channels),
        up_block_types=("UpDecoderBlock2D",) * len(channels),
        **settings,
    )


def unet(
    channels: Sequence[int], width: int, attends: Sequence[bool] = (True, False), **changes: Any
) -> UNet2DConditionModel:
    """Return a UNet for texts of a width.

    Args:
        channels: of each stage.
        width: of the text's embeddings.
        attends: whether a stage sees the text.
        changes: further settings.
    """
    kinds = ["CrossAttn" if each else "" for each in attends]
    settings = {"layers_per_block": 1, **changes}
    return UNet2DConditionModel(
        block_out_channels=tuple(channels),
        down_block_types=tuple(f"{kind}DownBlock2D" for kind in kinds),
        up_block_types=tuple(f"{kind}UpBlock2D" for kind in reversed(kinds)),
        cross_attention_dim=width,
        **settings,
    )
