"""The loss: how well a network finds the noise in noisy latents.

The forward process and both targets are those of diffusers' DDPMScheduler: noisy = sqrt(a) x +
sqrt(1 - a) noise (Ho et al. 2020, https://arxiv.org/abs/2006.11239); the target is the noise, or
v = sqrt(a) noise - sqrt(1 - a) x (Salimans and Ho 2022, https://arxiv.org/abs/2202.00512).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias

import torch
from diffusers import DDPMScheduler

from latentmake.errors import ModelError
from latentmake.trainers.data import Batch, Caches
from latentmake.trainers.schedule import generator

__all__ = [
    "Network",
    "NoiseSchedule",
    "draw_noise",
    "item_losses",
    "load_noise_schedule",
    "probe_loss",
    "target",
]

_PROBES = 64
NoiseSchedule: TypeAlias = Any  # a DDPMScheduler: diffusers has no types
_Schedule: NoiseSchedule = DDPMScheduler
Prediction = Literal["epsilon", "v_prediction"]


class Network(Protocol):
    """What the loss needs of a UNet: noisy latents, timesteps and text in, a prediction out."""

    def __call__(
        self,
        sample: torch.Tensor,
        timestep: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        *,
        encoder_attention_mask: torch.Tensor | None,
        return_dict: Literal[False],
    ) -> tuple[torch.Tensor]:
        """Return a tuple of the prediction, of the sample's shape."""


def load_noise_schedule(folder: Path, prediction: Prediction | None) -> NoiseSchedule:
    """Read the noise schedule a model was trained with.

    Args:
        folder: holds scheduler_config.json, of any of diffusers' schedulers.
        prediction: what the network predicts; None for what the schedule says.

    Raises:
        ModelError: it is missing or damaged, or the network predicts something else.
    """
    file = folder / "scheduler_config.json" if folder.is_dir() else folder
    try:
        config = json.loads(file.read_bytes())
        changes = {"clip_sample": False, "thresholding": False}  # latents have no bounds
        schedule = _Schedule.from_config(config, **changes)
    except (OSError, ValueError, TypeError, AttributeError, NotImplementedError):
        raise ModelError(
            "this noise schedule is missing or damaged",
            where=file,
            mend="set the model's `scheduler` to the folder of a diffusers scheduler",
        ) from None
    if prediction is not None:
        schedule.register_to_config(prediction_type=prediction)
    if schedule.config.prediction_type not in ("epsilon", "v_prediction"):
        raise ModelError(
            f"a network that predicts `{schedule.config.prediction_type}` cannot be trained",
            where=file,
            mend="set the trainer's `prediction_type` to epsilon or v_prediction",
        )
    return schedule


def target(
    schedule: NoiseSchedule, latents: torch.Tensor, noise: torch.Tensor, timesteps: torch.Tensor
) -> torch.Tensor:
    """Return what the network should predict, of the latents' shape."""
    if schedule.config.prediction_type == "epsilon":
        return noise
    velocity: torch.Tensor = schedule.get_velocity(latents, noise, timesteps)
    return velocity


def draw_noise(
    shape: torch.Size, timesteps: int, random: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return noise of a batch's shape and a timestep for each of its examples, on the CPU."""
    noise = torch.randn(shape, generator=random)
    return noise, torch.randint(0, timesteps, shape[:1], generator=random)


def item_losses(
    network: Network,
    schedule: NoiseSchedule,
    batch: Batch,
    noise: torch.Tensor,
    timesteps: torch.Tensor,
    *,
    device: torch.device,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return the mean squared error of each example, [batch], float32.

    Args:
        network: what predicts.
        schedule: says what.
        batch: latents [batch, channels, height, width] and embeddings.
        noise: of the latents' shape.
        timesteps: [batch], whole numbers.
        device: where the network is.
        dtype: number format of the network's inputs.
    """
    latents, noise = batch.latents.to(device), noise.to(device)
    timesteps = timesteps.to(device)
    noisy: torch.Tensor = schedule.add_noise(latents, noise, timesteps)
    (predicted,) = network(
        noisy.to(dtype),
        timesteps,
        batch.text.to(device, dtype),
        encoder_attention_mask=None if batch.mask is None else batch.mask.to(device),
        return_dict=False,
    )
    wanted = target(schedule, latents, noise, timesteps)
    return torch.nn.functional.mse_loss(predicted.float(), wanted.float(), reduction="none").mean(
        dim=(1, 2, 3)
    )


def probe_loss(
    losses: Callable[[Batch, torch.Tensor, torch.Tensor], torch.Tensor],
    caches: Caches,
    *,
    timesteps: int,
    batch_size: int,
    seed: int,
) -> float:
    """Return the mean loss over a fixed set of 64 examples, noises and timesteps.

    The timesteps are spread evenly over the schedule, for the loss depends on them more than on
    the example.

    Args:
        losses: from batch, noise and timesteps to the loss of each example.
        caches: the examples; in a small dataset each comes several times.
        timesteps: how many the schedule has.
        batch_size: most examples at once.
        seed: fixes the set.
    """
    random = generator(seed, "probe")
    order = torch.randperm(len(caches.examples), generator=random).tolist()
    spread = ((torch.arange(_PROBES) * 2 + 1) * timesteps) // (2 * _PROBES)
    spread = spread[torch.randperm(_PROBES, generator=random)]
    groups: dict[tuple[int, ...], list[int]] = {}
    for probe in range(_PROBES):
        shape = caches.examples[order[probe % len(order)]].shape
        groups.setdefault(shape, []).append(probe)
    total = 0.0
    with torch.no_grad():
        for _, probes in sorted(groups.items()):
            for start in range(0, len(probes), batch_size):
                part = probes[start : start + batch_size]
                batch = caches.batch([order[probe % len(order)] for probe in part])
                noise = torch.stack(
                    [
                        torch.randn(
                            batch.latents.shape[1:], generator=generator(seed, "probe", each)
                        )
                        for each in part
                    ]
                )
                total += float(losses(batch, noise, spread[part]).sum())
    return total / _PROBES
