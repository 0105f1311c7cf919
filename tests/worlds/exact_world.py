"""Pictures and whole but narrow encoders, to compare what is computed with a run in float64."""

from __future__ import annotations

import tiny_networks
import torch
from diffusers import AutoencoderKL

SIDE = 512
TOLERANCE: dict[torch.dtype, float] = {
    torch.float32: 1e-5,
    torch.bfloat16: 3e-2,
    torch.float16: 4e-3,
}
"""Largest difference of a result in a batch from the result alone, by the dtype that is computed
in, as a share of the largest value of the result: for each encoder of pixels and captions."""


def pictures(side: int = SIDE) -> dict[str, torch.Tensor]:
    """Return a white picture, noise and a gradient by name, each [1, side, side, 3] of uint8."""
    noise = torch.randint(0, 256, (side, side, 3), generator=torch.Generator().manual_seed(0))
    ramp = torch.linspace(0, 255, side).expand(side, side)
    gradient = torch.stack([ramp, ramp.T, 255 - ramp], dim=-1).round()
    white = torch.full((side, side, 3), 255)
    found = {"white": white, "noise": noise, "gradient": gradient}
    return {name: picture.to(torch.uint8)[None] for name, picture in found.items()}


def narrow_vae(*, flux: bool = False) -> AutoencoderKL:
    """Return the VAE of Stable Diffusion, or of Flux, with 4 channels at first in place of 128."""
    torch.manual_seed(0)
    own = {"latent_channels": 16, "use_quant_conv": False, "use_post_quant_conv": False}
    settings = own if flux else {}
    return tiny_networks.vae((4, 8, 16, 16), layers_per_block=2, **settings).eval()


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Return the largest difference from the exact values, as a share of the largest of those."""
    return float((found.double() - exact).abs().max() / exact.abs().max())
