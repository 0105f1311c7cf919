"""Loss of a network's prediction, by default that of flow matching.

Flow matching (Lipman et al. 2022, https://arxiv.org/abs/2210.02747) mixes noisy = (1 - s) x + s
noise, s a timestep's share of all, and its target is noise - x.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from latentmake.training.loop.batch import Batch, copied
from latentmake.training.loop.batch_order import generator
from latentmake.training.loop.caches import Caches


class Losses(NamedTuple):
    """Losses of a batch, [batch], float32.

    Attributes:
        raw: mean squared error of each example.
        weighted: the same, times the weight of its timestep.
    """

    raw: torch.Tensor
    weighted: torch.Tensor


class Objective:
    """Noise, timesteps and losses of a training. A trainer has its own `draw`, `at` and `predict`.

    Attributes:
        timesteps: their number.
        draw: from the shape of a micro-batch and a generator on the CPU: noise of this shape, and a
            timestep for each example.
        at: the timesteps at some shares, in [0, 1), of the way into the noise.
        predict: from network, batch, noisy latents on the network's device, timesteps [batch]
            wherever they were drawn, and dtype of the network's inputs: its prediction, of the
            latents' shape.
    """

    timesteps: int = 1000
    draw: Callable[[torch.Size, torch.Generator], tuple[torch.Tensor, torch.Tensor]]
    at: Callable[[torch.Tensor], torch.Tensor]
    predict: Callable[[Any, Batch, torch.Tensor, torch.Tensor, torch.dtype], torch.Tensor]

    def noisy(
        self, latents: torch.Tensor, noise: torch.Tensor, timesteps: torch.Tensor
    ) -> torch.Tensor:
        """Return latents with the noise of their timesteps."""
        sigmas = (timesteps / self.timesteps).view(-1, *[1] * (latents.ndim - 1))
        return (1 - sigmas) * latents + sigmas * noise

    def target(
        self, latents: torch.Tensor, noise: torch.Tensor, timesteps: torch.Tensor
    ) -> torch.Tensor:
        """Return the network's target, of the latents' shape."""
        del timesteps
        return noise - latents

    def weights(self, timesteps: torch.Tensor) -> torch.Tensor | None:
        """Return the weight of each timestep, [batch]; None where all have the same."""
        del timesteps
        return None

    def losses(
        self,
        network: Any,
        batch: Batch,
        noise: torch.Tensor,
        timesteps: torch.Tensor,
        *,
        device: torch.device,
        dtype: torch.dtype,
    ) -> Losses:
        """Return the loss of each example.

        Args:
            network: predicts.
            batch: of examples.
            noise: of the latents' shape.
            timesteps: [batch].
            device: of the network.
            dtype: of its inputs.
        """
        latents, noise = copied(batch.latents, device), copied(noise, device)
        there = copied(timesteps, device)
        noisy = self.noisy(latents, noise, there)
        predicted = self.predict(network, batch, noisy, timesteps, dtype)
        wanted = self.target(latents, noise, there)
        errors = torch.nn.functional.mse_loss(predicted.float(), wanted.float(), reduction="none")
        raw = errors.mean(dim=tuple(range(1, errors.ndim)))
        weights = self.weights(there)
        return Losses(raw, raw if weights is None else raw * weights)


def probe_loss(
    losses: Callable[[Batch, torch.Tensor, torch.Tensor], torch.Tensor],
    caches: Caches,
    *,
    objective: Objective,
    batch_size: int,
    seed: int,
    size: int = 64,
) -> float:
    """Return the mean loss over a fixed set of examples, noises and timesteps.

    The timesteps are spread evenly over the schedule, for the loss depends on them more than on
    the example. In a small dataset each example comes several times.

    Args:
        losses: from batch, noise and timesteps to the loss of each example.
        caches: the examples.
        objective: has the timesteps.
        batch_size: most examples at once.
        seed: fixes the set.
        size: of the set.
    """
    random = generator(seed, "probe")
    order = torch.randperm(len(caches), generator=random).tolist()
    spread = objective.at((torch.arange(size) + 0.5) / size)
    spread = spread[torch.randperm(size, generator=random)]
    examples = [order[probe % len(order)] for probe in range(size)]
    groups: dict[tuple[int, ...], list[int]] = {}
    for probe, index in enumerate(examples):
        groups.setdefault(caches.examples[index].shape, []).append(probe)
    total = 0.0
    with torch.no_grad():
        for _, probes in sorted(groups.items()):
            for start in range(0, len(probes), batch_size):
                part = probes[start : start + batch_size]
                batch = caches.batch([examples[probe] for probe in part])
                shape = batch.latents.shape[1:]
                noises = [torch.randn(shape, generator=generator(seed, "probe", p)) for p in part]
                noise = torch.stack(noises)
                total += float(losses(batch, noise, spread[part]).sum())
    return total / size
