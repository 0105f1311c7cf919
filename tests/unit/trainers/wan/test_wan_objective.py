"""Noise, timesteps, velocity and inputs of Wan's network, against plain torch and diffusers."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers import (
    FlowMatchEulerDiscreteScheduler,
)
from dit_world import tiny_dit
from latentmake.trainers.loop.caches import Batch
from latentmake.trainers.loop.recipe import generator
from latentmake.trainers.lora import add_adapter
from latentmake.trainers.wan.recipe import Denoiser, Objective
from latentmake.trainers.wan.sampling import padded
from torch.utils._python_dispatch import TorchDispatchMode
from trainer_world import losses_by

CPU = torch.device("cpu")
SHAPE = torch.Size((2, 16, 3, 4, 6))


def batch(**more: torch.Tensor) -> Batch:
    random = torch.Generator().manual_seed(3)
    latents = torch.randn(SHAPE, generator=random)
    return Batch(latents, torch.randn(2, 7, 24, generator=random), None, (0, 1), more)


def objective_of(
    shift: float,
    sampling: str = "logit_normal",
    *,
    boundary: float | None = None,
    low: bool = True,
    high: bool = False,
) -> Objective:
    model = SimpleNamespace(dit="a" if low else None, dit_high_noise="b" if high else None)
    trainer = SimpleNamespace(timestep_sampling=sampling)
    order: Any = SimpleNamespace(flow_shift=shift, boundary=boundary, model=model, trainer=trainer)
    return Objective(order)


def losses(objective: Objective, network: Any, noise: torch.Tensor, t: torch.Tensor) -> Any:
    return losses_by(objective, network, batch(), noise, t)


@pytest.mark.parametrize("shift", [1.0, 3.0, 12.0])
def test_timesteps_are_shifted_as_by_diffusers(shift: float) -> None:
    schedule: Any = FlowMatchEulerDiscreteScheduler(shift=shift)
    plain = torch.arange(1000, 0, -1, dtype=torch.float64) / 1000
    shares = objective_of(shift, "uniform").shares(plain)
    inside = (plain > 1e-4) & (plain < 1 - 1e-4)
    expected = schedule.sigmas[inside]
    torch.testing.assert_close(shares[inside].float(), expected, rtol=0, atol=1e-6)
    # The distribution before the shift is a sigmoid of normal numbers.
    random = torch.Generator().manual_seed(0)
    numbers = torch.randn(1000, generator=random, dtype=torch.float64)
    quantiles = 0.5 * (1 + torch.erf(numbers / math.sqrt(2)))
    sigmas = numbers.sigmoid()
    expected = shift * sigmas / (1 + (shift - 1) * sigmas)
    found = objective_of(shift, "logit_normal").shares(quantiles)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("sampling", ["logit_normal", "uniform"])
@pytest.mark.parametrize("shift", [3.0, 12.0])
def test_two_networks_are_drawn_as_often_as_their_ranges(sampling: Any, shift: float) -> None:
    """A batch is all on one side, and together the sides have the whole distribution."""
    both = objective_of(shift, sampling, boundary=0.875, low=True, high=True)
    random = generator("ranges")
    drawn = [both.draw(torch.Size((4, 1, 1, 1, 1)), random)[1] for _ in range(1500)]
    sides = [(each >= 875).float().mean().item() for each in drawn]
    assert set(sides) == {0.0, 1.0}
    whole = objective_of(shift, sampling)
    expected = (whole.at(torch.linspace(0, 1, 20_000)) >= 875).double().mean().item()
    assert sum(sides) / len(sides) == pytest.approx(expected, abs=0.04)
    values = torch.cat(drawn).sort().values
    quantiles = torch.tensor([whole.quantile(float(each) / 1000) for each in values])
    assert (quantiles - torch.linspace(0, 1, len(values))).abs().max() < 0.03
    for low, high, inside in (
        (True, False, lambda t: t < 875), (False, True, lambda t: t >= 875 - 1e-3)
    ):  # fmt: skip
        one = objective_of(shift, sampling, boundary=0.875, low=low, high=high)
        _, timesteps = one.draw(torch.Size((500, 1, 1, 1, 1)), random)
        assert inside(timesteps).all()
        assert inside(one.at(torch.linspace(0, 0.999, 50))).all()


def test_an_example_is_predicted_by_the_network_of_its_timestep() -> None:
    low, high = tiny_dit(), tiny_dit()
    with torch.no_grad():
        high.proj_out.bias += 1
    for network in (low, high):
        add_adapter(network, rank=2, target_modules=["to_q"])
    both, given = Denoiser(low, high, 0.9), batch()
    objective = objective_of(3.0, boundary=0.9, high=True)
    for timesteps in ([100.0, 899.0], [900.0, 999.0]):
        t = torch.tensor(timesteps)
        found = objective.predict(both, given, given.latents, t)
        with torch.no_grad():
            expected = [
                (high if each >= 900 else low)(
                    hidden_states=given.latents[n : n + 1],
                    timestep=t[n : n + 1],
                    encoder_hidden_states=padded(given.text)[n : n + 1],
                ).sample[0]
                for n, each in enumerate(timesteps)
            ]
        torch.testing.assert_close(found.detach(), torch.stack(expected), rtol=0, atol=1e-5)
    both.zero_grad()
    high_noise = torch.tensor([950.0, 990.0])
    losses(objective, both, torch.zeros(SHAPE), high_noise)[0].sum().backward()
    assert all(each.grad is None for each in low.parameters())
    assert any(each.grad is not None for each in high.parameters())


class _Copies(TorchDispatchMode):
    """Notes of each copy to another device whether the CPU waits for it."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[bool] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        named = kwargs or {}
        if func is torch.ops.aten._to_copy.default and named.get("device") not in (None, CPU):
            self.waits.append(not named.get("non_blocking"))
        return func(*args, **named)


@pytest.mark.parametrize("timestep", [100.0, 950.0])
def test_a_forward_pass_asks_the_device_for_nothing_and_waits_for_no_copy(timestep: float) -> None:
    device = torch.device("meta")  # no number can be read back from it
    both = Denoiser(tiny_dit(), tiny_dit(), 0.9).to(device)
    objective = objective_of(3.0, boundary=0.9, high=True)
    given = batch()._replace(text=torch.zeros(2, 600, 24, dtype=torch.bfloat16))
    with torch.no_grad(), _Copies() as copies:
        part = given, torch.zeros(SHAPE), torch.full((2,), timestep)
        losses_by(objective, both, *part, device="meta")
    assert copies.waits and not any(copies.waits)
