"""Recipe of a training: what the loop asks of the network it trains, and its loss.

Flow matching (Lipman et al. 2022, https://arxiv.org/abs/2210.02747) mixes noisy = (1 - s) x + s
noise, s a timestep's share of all, and its target is noise - x.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeAlias

import torch

from latentmake.training.loop.accelerator import generator
from latentmake.training.loop.caches import Batch, Caches, CacheTensors, Stored, copied
from latentmake.training.loop.order import TrainingOrder


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


Network: TypeAlias = Any  # a torch.nn.Module whose call is a matter of its recipe
Drawn = dict[str, torch.Tensor]
"""Keys of samples (`TrainingOrder.picture_keys`), and their latents, unscaled."""


class Sampler(ABC):
    """Settings and embeddings of the samples drawn along a training."""

    @abstractmethod
    def draw(
        self,
        network: Network,
        keys: Collection[str],
        *,
        device: torch.device,
        dtype: torch.dtype,
    ) -> Drawn:
        """Draw the samples of these keys; float32, on the CPU."""


class Recipe:
    """Network, objective, samples and written files of a training; a trainer has its own.

    Attributes:
        results: names of all files and folders that a training of this kind may leave in its
            output folder, of which one without the others belongs to an older training.
        probes: examples of the loss at the start and at the end.
        rate: scalar of the items trained on in a second.
        several: whether a step may leave some trained weights without gradients.
        tensors: what it reads of cache files.
        alpha: scale of the LoRA; None where none is trained.
        make_objective: returns noise, timesteps and loss; raises ModelError where they do not fit
            the network.
        make_network: returns the network as a training begins with it, the same each time, from
            `channels` of the latents, `text_width` of the captions' embeddings and the `dtype` of
            frozen weights; raises UserError where network, caches and settings do not fit.
        make_sampler: returns the sampler of a training; a cache file's latents have their scale and
            size.
        make_decoder: loads the VAE, and returns what makes a file's content of a sample's latents;
            that is None where memory does not suffice, even in tiles.
        write_copy: writes the trained weights into a folder of their own; one of that name is
            replaced.
        read_copy: puts back the weights of such a folder; raises TrainingError where they are
            missing or damaged, or of another network.
    """

    results: ClassVar[tuple[str, ...]]
    probes: ClassVar[int] = 64
    rate: ClassVar[str] = "images_per_second"
    several: bool = False
    order: TrainingOrder
    tensors: CacheTensors
    alpha: float | None
    make_objective: Callable[[], Objective]
    make_network: Callable[..., Network]
    make_sampler: Callable[[Any, Stored], Sampler]
    make_decoder: Callable[[torch.device], Callable[[torch.Tensor], bytes | None]]
    write_copy: Callable[[Network, Path], None]
    read_copy: Callable[[Network, Path], None]

    def __init__(self, order: Any) -> None:
        self.order = order
