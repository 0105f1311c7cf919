"""Loss of a UNet's prediction of noise, velocity or flow in noisy latents.

Diffusion is that of diffusers' DDPMScheduler: noisy = sqrt(a) x + sqrt(1 - a) noise (Ho et al.
2020, https://arxiv.org/abs/2006.11239); the target is the noise, or v = sqrt(a) noise - sqrt(1 - a)
x (Salimans and Ho 2022, https://arxiv.org/abs/2202.00512). Flow matching is that of diffusers'
FlowMatchEulerDiscreteScheduler.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from diffusers import DDPMScheduler, FlowMatchEulerDiscreteScheduler
from diffusers.training_utils import compute_snr

from latentmake.config.weights import Weights
from latentmake.errors import ModelError
from latentmake.training.loop.batch import Batch, copied
from latentmake.training.loop.objective import Objective as LoopObjective
from latentmake.training.sd.unet import damaged_schedule, read_schedule

NoiseSchedule: TypeAlias = Any  # one of diffusers' schedulers, which have no types
_Diffusion: NoiseSchedule = DDPMScheduler
_Flow: NoiseSchedule = FlowMatchEulerDiscreteScheduler
_snr: Callable[[NoiseSchedule, torch.Tensor], torch.Tensor] = compute_snr
Prediction = Literal["epsilon", "v_prediction", "flow_matching"]


def load_noise_schedule(
    scheduler: Path | str, prediction: Prediction | None, unet: Weights | None = None
) -> NoiseSchedule:
    """Return a FlowMatchEulerDiscreteScheduler for flow matching, else a DDPMScheduler.

    Args:
        scheduler: folder of scheduler_config.json, of any of diffusers' schedulers; "" for that of
            the UNet's repository on the hub.
        prediction: of the network; None for that of the schedule.
        unet: the network.

    Raises:
        ModelError: it is missing or damaged, or the network predicts something else.
    """
    config = read_schedule(scheduler, prediction, unet)
    flows = str(config.get("_class_name", "")).startswith("FlowMatch")
    try:
        if flows or prediction == "flow_matching":
            known = {"num_train_timesteps": config.get("num_train_timesteps", 1000)}
            return _Flow.from_config(config if flows else known)
        changes = {"clip_sample": False, "thresholding": False}  # latents have no bounds
        schedule = _Diffusion.from_config(config, **changes)
    except (ValueError, TypeError, AttributeError, NotImplementedError):
        raise damaged_schedule(scheduler) from None
    if prediction is not None:
        schedule.register_to_config(prediction_type=prediction)
    return schedule


def predict(
    network: Any, batch: Batch, noisy: torch.Tensor, timesteps: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Return the UNet's prediction; see the loop's `Objective`.

    SDXL's further conditions are those of `more`, under diffusers' names.
    """
    device = noisy.device
    predicted: torch.Tensor = network(
        noisy.to(dtype),
        copied(timesteps, device),
        copied(batch.text, device, dtype),
        encoder_attention_mask=None if batch.mask is None else copied(batch.mask, device),
        added_cond_kwargs={name: copied(each, device) for name, each in batch.more.items()},
        return_dict=False,
    )[0]
    return predicted


class Objective(LoopObjective):
    """Noise, timesteps and losses of a training.

    Args:
        schedule: of `load_noise_schedule`.
        snr_gamma: Min-SNR weighting (Hang et al. 2023, https://arxiv.org/abs/2303.09556): a
            timestep counts min(snr, gamma) / snr, and for v min(snr, gamma) / (snr + 1); None
            weighs all alike.
        noise_offset: share of noise that is constant over a channel
            (https://www.crosslabs.org/blog/diffusion-with-offset-noise).
    """

    predict = staticmethod(predict)

    def __init__(
        self,
        schedule: NoiseSchedule,
        *,
        snr_gamma: float | None = None,
        noise_offset: float = 0.0,
    ) -> None:
        self.schedule = schedule
        self.flow = isinstance(schedule, FlowMatchEulerDiscreteScheduler)
        self.timesteps = int(schedule.config.num_train_timesteps)
        self._gamma = snr_gamma
        self._offset = noise_offset
        if self.flow and snr_gamma is not None:
            raise ModelError(
                "the model's noise schedule is one of flow matching, which has no `snr_gamma`",
                where="trainer.snr_gamma",
                hint="leave it out",
            )

    def draw(self, shape: torch.Size, random: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        """Return noise of a batch's shape and a timestep for each of its examples, on the CPU.

        Timesteps are whole numbers from 0 for diffusion, and for flow matching float32 in
        (0, timesteps), spread evenly before the schedule's shift.
        """
        noise = torch.randn(shape, generator=random)
        if self._offset:
            noise += self._offset * torch.randn((*shape[:2], 1, 1), generator=random)
        if self.flow:
            return noise, self.at(torch.rand(shape[:1], generator=random))
        return noise, torch.randint(0, self.timesteps, shape[:1], generator=random)

    def at(self, shares: torch.Tensor) -> torch.Tensor:
        """Return the timesteps at some shares, in [0, 1), of the way into the noise."""
        if not self.flow:
            return (shares * self.timesteps).long()
        shift = float(self.schedule.config.shift)
        sigmas = shares.clamp(1e-5, 1 - 1e-5)
        return self.timesteps * shift * sigmas / (1 + (shift - 1) * sigmas)

    def noisy(
        self, latents: torch.Tensor, noise: torch.Tensor, timesteps: torch.Tensor
    ) -> torch.Tensor:
        """Return latents with the noise of their timesteps."""
        if self.flow:
            return super().noisy(latents, noise, timesteps)
        mixed: torch.Tensor = self.schedule.add_noise(latents, noise, timesteps)
        return mixed

    def target(
        self, latents: torch.Tensor, noise: torch.Tensor, timesteps: torch.Tensor
    ) -> torch.Tensor:
        """Return the network's target, of the latents' shape."""
        if self.flow:
            return super().target(latents, noise, timesteps)
        if self.schedule.config.prediction_type == "epsilon":
            return noise
        velocity: torch.Tensor = self.schedule.get_velocity(latents, noise, timesteps)
        return velocity

    def weights(self, timesteps: torch.Tensor) -> torch.Tensor | None:
        """Return the weight of each timestep, [batch]; None where all have the same."""
        if self._gamma is None:
            return None
        snr = _snr(self.schedule, timesteps)
        least = snr.clamp(max=self._gamma)
        if self.schedule.config.prediction_type == "v_prediction":
            return least / (snr + 1)
        return torch.where(snr > 0, least / snr, 1.0)  # its limit where all is noise
