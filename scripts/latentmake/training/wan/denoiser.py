"""Wan's network in training: one, or Wan 2.2's two, each with a LoRA."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from latentmake.training.wan.network import Transformer

_TIMESTEPS = 1000


class Denoiser(torch.nn.Module):
    """One network for all timesteps, or two with a boundary between them.

    Attributes:
        low: the network for low noise, or the only one; None where it is not trained.
        high: that for high noise, likewise.
        boundary: share of the timesteps from which on `high` is used.
    """

    def __init__(
        self, low: Transformer | None, high: Transformer | None = None, boundary: float = 1.0
    ) -> None:
        super().__init__()
        self.low = low
        self.high = high
        self.boundary = boundary

    def forward(
        self,
        hidden_states: torch.Tensor,
        timestep: torch.Tensor,
        *,
        high: Sequence[bool] | None = None,
        **named: Any,
    ) -> Any:
        """Call the network of each example's timestep; return (velocity,).

        Args:
            hidden_states: noisy latents, [batch, ...].
            timestep: [batch].
            high: whether each of them belongs to the network for high noise, where it is known
                without asking the device.
            named: further arguments.
        """
        if self.low is None or self.high is None:
            network = self.high if self.low is None else self.low
            assert network is not None
            return network(hidden_states=hidden_states, timestep=timestep, **named)
        if high is None:
            high = (timestep >= self.boundary * _TIMESTEPS).tolist()
        if all(high) or not any(high):
            network = self.high if high[0] else self.low
            return network(hidden_states=hidden_states, timestep=timestep, **named)
        is_high = torch.tensor(high, device=timestep.device)
        predicted = torch.empty_like(hidden_states[:, : self.low.config.out_channels])
        for network, chosen in ((self.low, ~is_high), (self.high, is_high)):
            part = {
                name: value[chosen] if isinstance(value, torch.Tensor) else value
                for name, value in named.items()
            }
            (found,) = network(
                hidden_states=hidden_states[chosen], timestep=timestep[chosen], **part
            )
            predicted = predicted.to(found.dtype)
            predicted[chosen] = found
        return (predicted,)
