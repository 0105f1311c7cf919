"""Flow matching as Wan was trained: loss of a predicted velocity at shifted timesteps.

A share s of the noise is drawn (uniform, or the sigmoid of a normal number: Esser et
al. 2024, section 3.1, https://arxiv.org/abs/2403.03206) and shifted to shift s / (1 + (shift - 1)
s), as diffusers' FlowMatchEulerDiscreteScheduler and musubi-tuner's `--timestep_sampling shift` do;
the network sees 1000 s.
"""

from __future__ import annotations

from typing import Any, Literal

import torch

from latentmake.errors import TrainingError
from latentmake.training.loop import objective as loop
from latentmake.training.loop.batch import Batch, copied
from latentmake.training.wan.sampling import TEXT_TOKENS

FIRST_FRAME = "latents_image"
CLIP = "clip"
"""Names of image-to-video's tensors in a batch: mask and latents of the first frame [batch, 20,
frames, height, width], and the CLIP image encoder's hidden states [batch, tokens, width]."""

_LEAST = 1e-5  # of a share: a normal number is infinite at 0 and 1


class Objective(loop.Objective):
    """Noise, timesteps and losses of a training.

    Args:
        shift: of the timesteps.
        sampling: distribution before the shift.
        boundary: share of the timesteps at which Wan 2.2 changes its network; None for one network.
        low: whether the network for low noise (or the only one) is trained.
        high: whether that for high noise is.

    Raises:
        TrainingError: a network would have no timesteps.
    """

    def __init__(
        self,
        shift: float,
        sampling: Literal["logit_normal", "uniform"] = "logit_normal",
        *,
        boundary: float | None = None,
        low: bool = True,
        high: bool = False,
    ) -> None:
        self.shift = shift
        self._boundary = boundary
        self._normal = sampling == "logit_normal"
        split = 1.0 if boundary is None else self.quantile(boundary)
        # Ranges of quantiles: a number drawn in one of them gives a timestep of that network.
        self.ranges = [
            each for each, trained in (((0.0, split), low), ((split, 1.0), high)) if trained
        ]
        if any(stop - start < _LEAST for start, stop in self.ranges):
            raise TrainingError(
                f"a shift of {shift:g} leaves no timesteps on one side of {boundary}",
                where="trainer.flow_shift",
                hint="leave it out, or train the other network alone",
            )

    def quantile(self, share: float) -> float:
        """Return the probability of a shifted share below this one."""
        plain = torch.tensor(share / (self.shift - (self.shift - 1) * share), dtype=torch.float64)
        return float(torch.special.ndtr(torch.logit(plain)) if self._normal else plain)

    def shares(self, quantiles: torch.Tensor) -> torch.Tensor:
        """Return the shifted shares of noise [batch] at quantiles [batch] of their distribution."""
        plain = quantiles.double().clamp(_LEAST, 1 - _LEAST)
        if self._normal:
            plain = torch.special.ndtri(plain).sigmoid()
        return self.shift * plain / (1 + (self.shift - 1) * plain)

    def at(self, shares: torch.Tensor) -> torch.Tensor:
        """Return timesteps [batch], float32, at quantiles over the ranges that are trained."""
        total = sum(stop - start for start, stop in self.ranges)
        places = shares.double() * total
        quantiles = torch.zeros_like(places)
        for start, stop in self.ranges:
            inside = places >= 0
            quantiles = torch.where(inside, start + places, quantiles)
            places = places - (stop - start)
        return self._timesteps(quantiles)

    def _timesteps(self, quantiles: torch.Tensor) -> torch.Tensor:
        return (self.shares(quantiles) * self.timesteps).float()

    def draw(self, shape: torch.Size, random: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw noise of this shape, and timesteps of one network for a micro-batch.

        Of two networks each comes as often as its range of timesteps does.

        Args:
            shape: of the batch's latents, [batch, channels, frames, height, width].
            random: generator on the CPU.
        """
        noise = torch.randn(shape, generator=random)
        start, stop = self.ranges[0]
        if len(self.ranges) > 1:
            first = (stop - start) / sum(end - begin for begin, end in self.ranges)
            if float(torch.rand((), generator=random, dtype=torch.float64)) >= first:
                start, stop = self.ranges[1]
        drawn = torch.rand(shape[:1], generator=random, dtype=torch.float64)
        return noise, self._timesteps(start + (stop - start) * drawn)

    def predict(
        self,
        network: Any,
        batch: Batch,
        noisy: torch.Tensor,
        timesteps: torch.Tensor,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        """Return the network's velocity."""
        inputs = inputs_of(batch, noisy, timesteps, device=noisy.device, dtype=dtype)
        if self._boundary is not None:  # asked of the device, it would make the CPU wait
            inputs["high"] = (timesteps >= self._boundary * self.timesteps).tolist()
        predicted: torch.Tensor = network(**inputs)[0]
        return predicted


def inputs_of(
    batch: Batch,
    noisy: torch.Tensor,
    timesteps: torch.Tensor,
    *,
    device: torch.device,
    dtype: torch.dtype,
) -> dict[str, Any]:
    """Return the arguments of Wan's network, as diffusers' WanPipeline and its like call it.

    Text is followed by zeros, without a mask. Image-to-video's first frame comes behind the noisy
    latents, in their channels.

    Args:
        batch: of examples.
        noisy: latents, [batch, channels, frames, height, width].
        timesteps: [batch].
        device: of the network.
        dtype: of its inputs.
    """
    hidden = noisy.to(dtype)
    if FIRST_FRAME in batch.more:
        hidden = torch.cat([hidden, copied(batch.more[FIRST_FRAME], device, dtype)], dim=1)
    text = copied(batch.text, device, dtype)[:, :TEXT_TOKENS]
    text = torch.nn.functional.pad(text, (0, 0, 0, TEXT_TOKENS - text.shape[1]))
    seen = batch.more.get(CLIP)
    return {
        "hidden_states": hidden,
        "timestep": copied(timesteps, device),
        "encoder_hidden_states": text,
        "encoder_hidden_states_image": None if seen is None else copied(seen, device, dtype),
        "return_dict": False,
    }
