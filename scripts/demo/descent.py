"""Training of networks and autoencoders for the tiny models, and writing of their files.

A VAE with ordinary initial weights learns colours only after thousands of steps. Here the layers
start close to the identity. Such a VAE keeps the colours from the first step, and only has to
learn the shapes.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from latentmake.base.progress import Progress
from torch import Tensor, nn
from torch.nn import functional

_WARM_UP = 20  # steps
_RANDOM_SHARE = 0.3  # factor of the ordinary initial weights, which are added to the identity
_NO_NOISE = -10.0  # logarithm of the posterior's variance
_LATENT_PENALTY = 1e-3


def descend(
    network: nn.Module,
    loss: Callable[[], Tensor],
    steps: int,
    *,
    name: str,
    learning_rate: float,
) -> None:
    """Train a network with AdamW, a warm-up and a linear decay of the learning rate.

    Args:
        network: network that is changed in place; it is in evaluation mode at the end.
        loss: function that returns the loss of a new batch.
        steps: number of optimizer steps.
        name: name in the progress bar.
        learning_rate: largest learning rate.
    """
    optimizer = torch.optim.AdamW(
        network.parameters(), lr=learning_rate, betas=(0.9, 0.98), weight_decay=0, fused=True
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / _WARM_UP) * max(0.01, 1 - step / steps)
    )
    network.train()
    bar = Progress(range(steps), desc=name, unit="step")
    for _ in bar:
        value = loss()
        optimizer.zero_grad()
        torch.autograd.backward(value)
        nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        bar.set_postfix_str(f"loss {value.item():.4f}", refresh=False)
    network.eval()


def train_vae(
    autoencoder: Any, batch: Callable[[], Tensor], steps: int, *, name: str, learning_rate: float
) -> None:
    """Train an autoencoder of diffusers to reconstruct its inputs; see `descend`.

    Args:
        autoencoder: untrained autoencoder, which is changed in place.
        batch: function that returns new pictures or clips, with values from -1 to 1.
        steps: number of optimizer steps.
        name: name in the progress bar.
        learning_rate: largest learning rate.
    """
    with torch.no_grad():
        _start_as_identity(autoencoder)

    def loss() -> Tensor:
        pixels = batch()
        latents = autoencoder.encode(pixels).latent_dist.mean
        decoded = autoencoder.decode(latents).sample
        total: Tensor = (
            functional.mse_loss(decoded, pixels)
            + 0.5 * functional.l1_loss(decoded, pixels)
            + _LATENT_PENALTY * latents.square().mean()
        )
        return total

    descend(autoencoder, loss, steps, name=name, learning_rate=learning_rate)


def crop(pixels: Tensor, side: int, generator: torch.Generator) -> Tensor:
    """Return a random square crop [..., side, side], which trains faster than a full picture."""
    top, left = (
        int(torch.randint((length - side) // 4 + 1, (), generator=generator)) * 4
        for length in pixels.shape[-2:]
    )
    return pixels[..., top : top + side, left : left + side]


def _start_as_identity(autoencoder: Any) -> None:
    """Set the weights so that convolutions and residual blocks return about their inputs."""
    for name, layer in autoencoder.named_modules():
        if not isinstance(layer, nn.Conv2d | nn.Conv3d):
            continue
        weight: Any = layer.weight
        bias: Any = layer.bias
        place = [side // 2 for side in layer.kernel_size]
        if isinstance(layer, nn.Conv3d):
            place[0] = -1  # the convolution is causal in time: its last tap is the current frame
        bias.zero_()
        if name.endswith(".conv2"):  # last convolution of a residual block; 0 leaves its input
            weight.zero_()
            continue
        weight *= _RANDOM_SHARE
        outer, inner = weight.shape[:2]
        # Wan's upsampling in time doubles the channels and makes frames of them, so both halves
        # start as the identity.
        for first in (0, inner) if name.endswith(".time_conv") and outer > inner else (0,):
            same = min(outer, inner)
            weight[range(first, first + same), range(same), *place] += 1
    # Only the posterior's mean is trained; its variance stays almost 0.
    half = autoencoder.quant_conv.out_channels // 2
    autoencoder.quant_conv.weight[half:] = 0
    autoencoder.quant_conv.bias[half:] = _NO_NOISE


def save(pipeline: Any, folder: Path) -> None:
    """Write a pipeline of diffusers in float16 that loads as float32."""
    pipeline.to(torch.float16).save_pretrained(folder, safe_serialization=True)
    # diffusers loads weights as float32, but transformers uses the dtype of the configuration.
    config = folder / "text_encoder/config.json"
    config.write_text(config.read_text().replace('"float16"', '"float32"'))
