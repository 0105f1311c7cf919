"""Gradient descent on the sample's networks, and the loss of their autoencoders."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from latentmake.progress import Progress
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["descend", "train_vae"]

_LATENT_PENALTY = 1e-3


def descend(
    network: nn.Module,
    loss: Callable[[int], Tensor],
    steps: int,
    *,
    name: str,
    learning_rate: float,
    end: float = 0.05,
    betas: tuple[float, float] = (0.9, 0.999),
    max_norm: float | None = None,
) -> None:
    """Train a network by AdamW, with a warm-up of ten steps and a linear decay.

    Args:
        network: changed in place; in evaluation mode at the end.
        loss: of a step, counted from 0.
        steps: optimizer steps.
        name: shown with the progress.
        learning_rate: its peak.
        end: share of the peak below which it does not fall.
        betas: of AdamW.
        max_norm: gradients are clipped to this norm; None does not clip.
    """
    optimizer = torch.optim.AdamW(
        network.parameters(), lr=learning_rate, betas=betas, weight_decay=0, fused=True
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / 10) * max(end, 1 - step / max(1, steps))
    )
    network.train()
    for step in Progress(range(steps), desc=name, unit="step"):
        found = loss(step)
        optimizer.zero_grad()
        torch.autograd.backward(found)
        if max_norm is not None:
            nn.utils.clip_grad_norm_(network.parameters(), max_norm)
        optimizer.step()
        schedule.step()
    network.eval()


def train_vae(
    autoencoder: Any,
    batch: Callable[[int], Tensor],
    steps: int,
    *,
    name: str,
    learning_rate: float,
) -> None:
    """Train an autoencoder of diffusers to give back its inputs; see `descend`.

    Args:
        autoencoder: changed in place.
        batch: pictures or clips of a step, in -1 to 1.
        steps: optimizer steps.
        name: shown with the progress.
        learning_rate: its peak.
    """

    def loss(step: int) -> Tensor:
        pixels = batch(step)
        latents = autoencoder.encode(pixels).latent_dist.mean
        decoded = autoencoder.decode(latents).sample
        found: Tensor = (
            functional.mse_loss(decoded, pixels)
            + 0.5 * functional.l1_loss(decoded, pixels)
            + _LATENT_PENALTY * latents.square().mean()
        )
        return found

    descend(
        autoencoder,
        loss,
        steps,
        name=name,
        learning_rate=learning_rate,
        end=0.02,
        betas=(0.9, 0.95),
        max_norm=1.0,
    )
