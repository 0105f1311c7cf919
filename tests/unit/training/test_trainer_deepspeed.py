"""Trainings under DeepSpeed's ZeRO: the same weights as without it, killed or not."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from latentmake.errors import TrainingError
from latentmake.training.order import TrainingOrder
from latentmake.training.result import Layout, wanted
from latentmake.training.sd import checkpoint
from latentmake.training.sd.launch import train
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from trainer_world import make_order, write_order

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed"
)

SCRIPTS = Path(__file__).parents[3] / "scripts"
SETTINGS: dict[str, Any] = {
    "steps": 6,
    "rank": 4,
    "learning_rate": 1e-2,
    "lr_scheduler": "cosine",
    "lr_warmup_steps": 2,
    "gradient_accumulation_steps": 2,
    "max_grad_norm": 0.05,
    "ema_decay": 0.9,
    "checkpointing_steps": 4,
    "seed": 7,
}


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.cuda.is_available():
        monkeypatch.setenv("DS_ACCELERATOR", "cpu")


def configuration(root: Path, *, stage: int = 2, processes: int = 1, offload: str = "none") -> str:
    """Write a file as `accelerate config` does, and return its path."""
    values = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "DEEPSPEED",
        "deepspeed_config": {"zero_stage": stage, "offload_optimizer_device": offload},
        "mixed_precision": "no",
        "num_machines": 1,
        "num_processes": processes,
        "use_cpu": not torch.cuda.is_available(),
    }
    path = root / f"zero{stage}-{processes}-{offload}.yaml"
    path.write_text(json.dumps(values))  # JSON is YAML
    return str(path)


def _environment() -> dict[str, str]:
    path = os.pathsep.join([str(SCRIPTS), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def carry_out(root: Path, output: str, **settings: Any) -> TrainingOrder:
    order = make_order(root, output=output, **{**SETTINGS, **settings})
    path = write_order(order, root / f"{output}.json")
    train(path, log=root / f"{output}.log", receipt=root / f"{output}.receipt", threads=1)
    return order


def scalars(order: TrainingOrder) -> dict[str, list[float]]:
    events = EventAccumulator(str(Layout(order).scalars))
    events.Reload()
    return {
        tag: [each.value for each in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
        if tag != "images_per_second"
    }


def assert_equal_trainings(first: TrainingOrder, second: TrainingOrder) -> None:
    one, other = load_file(Layout(first).weights), load_file(Layout(second).weights)
    assert one.keys() == other.keys()
    for name, value in one.items():
        torch.testing.assert_close(value, other[name], atol=1e-5, rtol=1e-5)
    ours, theirs = scalars(first), scalars(second)
    assert ours.keys() == theirs.keys()
    for tag, values in ours.items():
        assert values == pytest.approx(theirs[tag], rel=1e-4), tag


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("deepspeed")


@pytest.fixture(scope="module")
def plain(root: Path) -> TrainingOrder:
    return carry_out(root, "plain")


@pytest.mark.parametrize("stage", [1, 2])
def test_zero_trains_what_is_trained_without_it(
    root: Path, plain: TrainingOrder, stage: int
) -> None:
    order = carry_out(root, f"zero{stage}", accelerate_config=configuration(root, stage=stage))
    assert_equal_trainings(plain, order)
    # Something was learned and something was clipped: what is compared is not the beginning.
    weights = load_file(Layout(plain).weights)
    assert any(value.abs().max() > 1e-4 for name, value in weights.items() if ".up." in name)
    assert max(scalars(plain)["gradient_norm"]) > SETTINGS["max_grad_norm"]


def test_a_whole_unet_in_bfloat16_is_the_same_with_and_without_zero(root: Path) -> None:
    settings = {"adapter": "full", "mixed_precision": "bf16", "ema_decay": None, "steps": 3}
    plain = carry_out(root, "full", **settings)
    zero = carry_out(root, "full-zero", **settings, accelerate_config=configuration(root))
    name = "unet/diffusion_pytorch_model.safetensors"
    one, other = load_file(Path(plain.output) / name), load_file(Path(zero.output) / name)
    for key, value in one.items():
        assert value.dtype == other[key].dtype == torch.float32
        torch.testing.assert_close(value, other[key], atol=1e-4, rtol=1e-4)


def _by_two(order: TrainingOrder, path: Path, config: str | None) -> None:
    """Train by two processes on the CPU, under DeepSpeed where there is a configuration."""
    write_order(order, path)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    if config is None:
        launcher = ["torch.distributed.run", "--nproc_per_node", "2", "--master_port", port]
        launched = ["-m", "latentmake.training.sd.train"]
    else:
        launcher = ["accelerate.commands.launch", "--config_file", config]
        launcher += ["--main_process_port", port]
        launched = [str(Path(__file__).parents[2] / "worlds" / "deepspeed_cpu.py")]
    subprocess.run(
        [sys.executable, "-m", *launcher, *launched, str(path)],
        env={**_environment(), **({} if config else {"ACCELERATE_USE_CPU": "true"})},
        check=True,
        timeout=600,
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="two processes share a CPU, not a GPU")
@pytest.mark.parametrize("stage", [1, 2])
def test_two_processes_train_the_same_with_and_without_zero(root: Path, stage: int) -> None:
    plain = make_order(root, output="two", **SETTINGS)
    if not Layout(plain).weights.exists():
        _by_two(plain, root / "two.json", None)
    zero = make_order(root, output=f"two-zero{stage}", **SETTINGS)
    config = configuration(root, stage=stage, processes=2)
    _by_two(zero, root / f"two-zero{stage}.json", config)
    assert_equal_trainings(plain, zero)
    states = [
        checkpoint.load(checkpoint.find(Layout(each).checkpoints, wanted(each))[0])
        for each in (plain, zero)
    ]
    assert states[0] is not None
    assert states[1] is not None
    ours, theirs = states[0][1]["optimizer"], states[1][1]["optimizer"]
    assert ours["state"].keys() == theirs["state"].keys()
    for index, held in ours["state"].items():
        torch.testing.assert_close(held, theirs["state"][index], atol=1e-5, rtol=1e-4)


def test_a_killed_training_ends_with_the_same_bytes(root: Path) -> None:
    config = configuration(root)
    settings = {"steps": 30, "checkpointing_steps": 3, "accelerate_config": config}
    whole = carry_out(root, "whole", **settings)
    order = make_order(root, output="killed", **{**SETTINGS, **settings})
    path = write_order(order, root / "killed.json")
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "accelerate.commands.launch", "--config_file", config),
            *("-m", "latentmake.training.sd.train", str(path)),
        ],
        env=_environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    while not checkpoint.find(Layout(order).checkpoints, wanted(order)):
        assert process.poll() is None
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert not Layout(order).weights.exists()
    log = root / "killed.log"
    train(path, log=log, receipt=root / "killed.receipt", threads=1)
    assert "going on from step" in log.read_text()
    assert Layout(order).weights.read_bytes() == Layout(whole).weights.read_bytes()


def test_a_training_begun_without_zero_goes_on_with_it(root: Path, plain: TrainingOrder) -> None:
    (begun,) = checkpoint.find(Layout(plain).checkpoints, wanted(plain))
    order = carry_out(
        root,
        "on",
        accelerate_config=configuration(root),
        resume_from_checkpoint=str(begun.folder),
    )
    one, other = load_file(Layout(plain).weights), load_file(Layout(order).weights)
    for name, value in one.items():
        torch.testing.assert_close(value, other[name], atol=1e-5, rtol=1e-5)


def test_a_loss_that_is_no_number_stops_under_zero_too(root: Path) -> None:
    with pytest.raises(TrainingError, match="is NaN or infinite at step"):
        carry_out(root, "wild", learning_rate=1e30, accelerate_config=configuration(root))


@pytest.mark.parametrize(
    ("stage", "settings", "said"),
    [
        (3, {}, "set `zero_stage` to 1 or 2"),
        (2, {"mixed_precision": "fp16"}, "set it to `bf16` or `no`"),
        (2, {"optimizer": "prodigy"}, "choose adamw or lion"),
    ],
)
def test_what_zero_would_change_is_refused(
    root: Path, stage: int, settings: dict[str, Any], said: str
) -> None:
    with pytest.raises(TrainingError, match=said):
        carry_out(root, "refused", accelerate_config=configuration(root, stage=stage), **settings)


def test_an_optimizer_elsewhere_is_refused(root: Path) -> None:
    config = configuration(root, offload="cpu")
    with pytest.raises(TrainingError, match="set `offload_optimizer_device` to none"):
        carry_out(root, "offloaded", accelerate_config=config)
