"""The loss: its targets, its mask, its fixed set for start and end."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers import UNet2DConditionModel
from latentmake.base.errors import ModelError
from latentmake.trainers.loop.caches import Batch, Caches, read_items
from latentmake.trainers.loop.recipe import Painter, generator
from latentmake.trainers.sd.network import Denoiser
from trainer_world import (
    TEXT_WIDTH,
    losses_by,
    make_manifest,
    make_scheduler,
    make_unet,
    objective_in,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("objective")
    make_unet(root / "unet")
    make_scheduler(root / "scheduler")
    make_manifest(root, tokens=(7, 4, 7))
    return root


def test_targets_follow_their_definitions(folder: Path) -> None:
    random = generator("targets")
    latents = torch.randn(3, 4, 8, 8, generator=random)
    epsilon = objective_in(folder / "scheduler")
    velocity = objective_in(folder / "scheduler", prediction_type="v_prediction")
    noise, timesteps = epsilon.draw(latents.shape, random)
    assert torch.equal(epsilon.mixed(latents, noise, timesteps)[1], noise)
    betas = torch.linspace(0.0001**0.5, 0.02**0.5, 1000) ** 2
    alpha = torch.cumprod(1 - betas, 0)[timesteps].view(-1, 1, 1, 1)
    expected = alpha.sqrt() * noise - (1 - alpha).sqrt() * latents
    torch.testing.assert_close(velocity.mixed(latents, noise, timesteps)[1], expected)


def test_the_prediction_type_of_the_schedule_holds_unless_the_trainer_says_otherwise(
    tmp_path: Path,
) -> None:
    make_scheduler(tmp_path / "v", prediction_type="v_prediction")
    assert objective_in(tmp_path / "v").schedule.config.prediction_type == "v_prediction"
    told = objective_in(tmp_path / "v", prediction_type="epsilon")
    assert told.schedule.config.prediction_type == "epsilon"
    make_scheduler(tmp_path / "sample", prediction_type="sample")
    with pytest.raises(ModelError, match="predicts `sample`"):
        objective_in(tmp_path / "sample")
    with pytest.raises(ModelError, match="noise schedule is missing"):
        objective_in(tmp_path / "none")


def test_a_schedule_written_for_another_sampler_is_read(tmp_path: Path) -> None:
    """Stable Diffusion 1.5 ships a PNDM scheduler, which says nothing of clipping."""
    (tmp_path / "scheduler_config.json").write_text(
        json.dumps(
            {
                "_class_name": "PNDMScheduler",
                "beta_start": 0.00085,
                "beta_end": 0.012,
                "beta_schedule": "scaled_linear",
                "num_train_timesteps": 1000,
                "set_alpha_to_one": False,
                "skip_prk_steps": True,
                "steps_offset": 1,
            }
        )
    )
    schedule = objective_in(tmp_path).schedule
    assert schedule.config.beta_end == 0.012
    assert not schedule.config.clip_sample


def test_padding_changes_no_loss(folder: Path) -> None:
    unet = UNet2DConditionModel.from_pretrained(folder / "unet")
    objective = objective_in(folder / "scheduler")
    denoiser = Denoiser(unet)
    caches = Caches(read_items(folder / "manifest.jsonl"))
    same_shape = [i for i, each in enumerate(caches.examples) if each.latents.shape == (4, 8, 8)]
    assert {len(caches.batch([i]).text[0]) for i in same_shape} == {4, 7}
    batch = caches.batch(same_shape)
    assert batch.mask is not None
    noise, timesteps = objective.draw(batch.latents.shape, generator("mask"))

    def losses(batch: Batch, noise: torch.Tensor, timesteps: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            raw, weighted = losses_by(objective, denoiser, batch, noise, timesteps)
            assert raw is weighted
            return raw

    together = losses(batch, noise, timesteps)
    alone = [
        losses(caches.batch([index]), noise[place : place + 1], timesteps[place : place + 1])
        for place, index in enumerate(same_shape)
    ]
    torch.testing.assert_close(together, torch.cat(alone), rtol=1e-4, atol=1e-5)
    unmasked = losses(batch._replace(mask=None), noise, timesteps)
    assert not torch.allclose(unmasked, together, rtol=1e-4, atol=1e-5)


def test_the_loss_at_start_and_end_is_over_a_fixed_set(folder: Path) -> None:
    caches = Caches(read_items(folder / "manifest.jsonl"))
    objective = objective_in(folder / "scheduler")
    seen: list[tuple[float, int]] = []

    def losses(_: Any, batch: Batch, noise: torch.Tensor, timesteps: torch.Tensor) -> Any:
        assert batch.text.shape[2] == TEXT_WIDTH
        found = noise.mean(dim=(1, 2, 3))
        seen.extend(zip(found.tolist(), timesteps.tolist(), strict=True))
        return found, found

    recipe = SimpleNamespace(order=SimpleNamespace(trainer=SimpleNamespace(seed=1)), probes=64)
    painter: Any = SimpleNamespace(losses=losses, objective=objective, recipe=recipe, network=None)
    first = Painter.probe_loss(painter, caches)
    set_of_first = sorted(seen)
    assert len(seen) == 64
    assert first == pytest.approx(sum(value for value, _ in seen) / 64)
    # One timestep in each sixty-fourth of the schedule.
    assert sorted(timestep * 64 // 1000 for _, timestep in seen) == list(range(64))
    seen.clear()
    assert Painter.probe_loss(painter, caches) == first
    assert sorted(seen) == set_of_first


def test_the_weight_of_an_example_multiplies_its_loss_and_not_its_raw_loss(folder: Path) -> None:
    objective = objective_in(folder / "scheduler", snr_gamma=5.0)
    batch = Caches(read_items(folder / "manifest.jsonl")).batch([0, 2])
    noise, timesteps = objective.draw(batch.latents.shape, generator("weights"))
    network = Denoiser(UNet2DConditionModel.from_pretrained(folder / "unet"), None)
    factors = torch.tensor([0.25, 1.0])
    plain, weighted = (
        losses_by(objective, network, each, noise, timesteps)
        for each in (batch, batch._replace(weights=factors))
    )
    assert torch.equal(weighted[0], plain[0])
    assert torch.equal(weighted[1], plain[1] * factors)
