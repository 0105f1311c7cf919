"""On a device that is not the CPU: nothing that a training or a drawing uses is left behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import trainer_world
import wan_trainer_world
from generation_world import generate, make_world, order_of
from latentmake.trainers.sd.recipe import SdRecipe
from latentmake.trainers.wan.recipe import Denoiser, WanRecipe
from virtual_device import DEVICE, virtual_device
from wan_trainer_world import TWO
from wan_world import tiny_wan_vae

SETTINGS: dict[str, Any] = {
    "steps": 2,
    "ema_decay": 0.9,
    "samples": {"num_inference_steps": 2, "guidance_scale": 2.0},
}


@pytest.fixture(autouse=True)
def _few_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    for recipe in (SdRecipe, WanRecipe):
        monkeypatch.setattr(recipe, "probes", 2)


def test_what_the_device_does_not_have_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with virtual_device(monkeypatch):
        layer, values = torch.nn.Linear(2, 2).to(DEVICE), torch.ones(1, 2)
        assert layer(values.to(DEVICE)).device == DEVICE
        with pytest.raises(RuntimeError, match="tensors of the CPU, too"):
            layer(values)


@pytest.mark.parametrize("room", [True, False])
def test_clips_of_two_networks_are_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    make_world(two=True)
    monkeypatch.setattr(Denoiser, "fits", lambda *_: room)
    with virtual_device(monkeypatch):
        generate(order_of("a wave"))


@pytest.mark.parametrize(
    ("changes", "room"),
    [({}, False), (TWO, True), (TWO, False), ({"task": "i2v-14B"}, True)],
    ids=["t2v", "two with room", "two", "i2v with room"],
)
def test_wan_is_trained_with_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], room: bool
) -> None:
    monkeypatch.setattr(Denoiser, "fits", lambda *_: room)
    i2v = "i2v" in changes.get("task", "")
    order = wan_trainer_world.make_order(tmp_path, prompts=not i2v, **changes, **SETTINGS)
    tiny_wan_vae(4).save_pretrained(order.model.vae.path)
    with virtual_device(monkeypatch):
        wan_trainer_world.make_training(order).run()


def test_sd_is_trained_and_draws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order = trainer_world.make_order(tmp_path, prompts=True, snr_gamma=5.0, **SETTINGS)
    with virtual_device(monkeypatch):
        trainer_world.make_training(order).run()
        trainer_world.follow(trainer_world.make_generation(order))
