"""The command lines of musubi-tuner's scripts: the flags that each takes, and no other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from latentmake.config.architectures import WAN
from latentmake.trainers.launched.order import Places, Resume
from latentmake.trainers.musubi.command import caching_arguments, training_arguments
from latentmake.trainers.musubi.order import MusubiOrder
from publish_world import TASKS, check_flags, needs_clip, order_of, value

LATENTS_SCRIPT, TEXT_SCRIPT = WAN.scripts.latents.name, WAN.scripts.text.name
TRAINING_SCRIPT = WAN.scripts.training.name


def training(order: MusubiOrder, **changes: Any) -> list[str]:
    places = Places(lambda path: f"/{path}", "/p/a.toml", "/p/output", "/p/logs", "/p/prompts")
    return training_arguments(
        order, places, changes.get("attention", "sdpa"), Resume(changes.get("resume"), counted=True)
    )


def caching(order: MusubiOrder, kind: str, **further: Any) -> list[str]:
    options = {f"--{name}": value for name, value in further.items()}
    return caching_arguments(
        order.model, kind, "/p/a.toml", lambda weights: f"/{weights.path}", options
    )


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("asked", [False, True])
def test_every_task_with_every_switch_gives_known_flags(task: str, asked: bool) -> None:
    two = task.endswith("A14B")
    network = {"vae_cache_cpu": asked, "fp8_t5": asked, "dit_high_noise": "high" if two else None}
    saving = {"save_every_n_epochs": 2} if asked else {}
    order = order_of(
        model={"task": task, **network},
        trainer={"fp8_base": asked, "fp8_scaled": asked, **saving},
    )
    latents, text = caching(order, "latents"), caching(order, "text")
    check_flags(LATENTS_SCRIPT, latents)
    check_flags(TEXT_SCRIPT, text)
    assert (value(latents, "--vae"), value(text, "--t5")) == (
        "/models/vae.safetensors",
        "/models/t5.pth",
    )
    assert value(latents, "--clip") == ("/models/clip.pth" if needs_clip(task) else None)
    assert ("--i2v" in latents) == task.startswith(("i2v", "flf2v"))
    assert ("--vae_cache_cpu" in latents) == ("--fp8_t5" in text) == asked

    for attention in order.scripts.attentions:
        arguments = training(order, attention=attention, resume=Path("/r"))
        check_flags(TRAINING_SCRIPT, arguments)
        assert f"--{attention}" in arguments
        assert (value(arguments, "--task"), value(arguments, "--resume")) == (task, "/r")
        assert value(arguments, "--dit_high_noise") == ("/high" if two else None)
        boundary = {"i2v-A14B": "900", "t2v-A14B": "875"}.get(task)
        assert value(arguments, "--timestep_boundary") == boundary
        assert {each in arguments for each in ("--fp8_base", "--fp8_scaled")} == {asked}
        assert value(arguments, "--save_every_n_epochs") == ("2" if asked else None)
        assert ("--save_state" in arguments) == asked


def test_caching_takes_sizes_of_batches_and_workers() -> None:
    order = order_of(model={"vae_dtype": "float32"})
    sizes = {"batch_size": 2, "num_workers": 3, "skip_existing": False, "keep_cache": True}
    for kind, script in (("latents", LATENTS_SCRIPT), ("text", TEXT_SCRIPT)):
        arguments = caching(order, kind, **sizes)
        check_flags(script, arguments)
        assert value(arguments, "--batch_size") == "2"
        assert value(arguments, "--num_workers") == "3"
        assert {"--skip_existing", "--keep_cache"} & set(arguments) == {"--keep_cache"}


def test_the_dtype_of_the_vae() -> None:
    for model, dtype in (({}, "bfloat16"), ({"dtype": "float16"}, "float16")):
        order = order_of(model=model)
        assert value(caching(order, "latents"), "--vae_dtype") == dtype
    order = order_of(model={"dtype": "float16", "vae_dtype": "float32"})
    assert value(caching(order, "latents"), "--vae_dtype") == "float32"


def test_a_boundary_of_the_user_goes_with_two_networks_only() -> None:
    order = order_of(trainer={"timestep_boundary": 800})
    assert "--timestep_boundary" not in training(order)
    order = order_of(model={"dit_high_noise": "h"}, trainer={"timestep_boundary": 800})
    assert value(training(order), "--timestep_boundary") == "800"


def test_what_is_left_to_the_trainer_is_not_given() -> None:
    order = order_of(
        trainer={"timestep_sampling": None, "discrete_flow_shift": None, "logging": False}
    )
    arguments = training(order)
    assert not {"--timestep_sampling", "--discrete_flow_shift", "--logging_dir"} & set(arguments)
    assert value(training(order_of()), "--logging_dir") == "/p/logs"


def test_arguments_of_the_user_come_last_and_as_they_are() -> None:
    own = ["--blocks_to_swap", "20", "--optimizer_args", "betas=(0.9, 0.99)"]
    order = order_of(trainer={"arguments": own})
    assert training(order, resume=Path("/r"))[-4:] == own
