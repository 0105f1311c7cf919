"""Training on a CUDA device, in bfloat16."""

from __future__ import annotations

import json
import math
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState

sys.path.insert(0, str(Path(__file__).parents[1] / "worlds"))

from latentmake.runs.order import Record, RunFiles
from latentmake.trainers.loop.caches import Caches, read_items
from latentmake.trainers.sd.recipe import Objective
from latentmake.trainers.sd.unet import SdOrder
from PIL import Image
from safetensors.torch import load_file
from trainer_world import losses_by, make_order, make_training, train, write_order

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def trained(order: SdOrder) -> Record:
    """Train in this process, and return what the training wrote of itself."""
    AcceleratorState._reset_state(True)  # accelerate keeps the number format of a process
    make_training(order).run()
    record = Record.read(RunFiles(order).record)
    assert record is not None
    return record


@pytest.mark.parametrize("adapter", ["lora", "full"])
def test_a_bfloat16_training_on_cuda_learns(tmp_path: Path, adapter: str) -> None:
    settings: dict[str, Any] = {
        "adapter": adapter,
        "steps": 80,
        "learning_rate": 3e-3,
        "target_modules": ["to_q", "to_k", "to_v", "to_out.0", "conv1", "conv2"],
        "mixed_precision": "bf16",
        "gradient_checkpointing": True,
        "checkpointing_steps": 30,
        "samples": {"num_inference_steps": 3},
    }
    order = make_order(tmp_path, prompts=True, **settings)
    record = trained(order)
    assert record.loss_end < 0.9 * record.loss_start
    weights = load_file(RunFiles(order).weights)
    assert {value.dtype for value in weights.values()} == {torch.float32}
    with Image.open(RunFiles(order).grid) as grid:
        assert grid.height > 5 * 64


def test_the_default_precision_is_the_devices_own_and_stays(tmp_path: Path) -> None:
    order = make_order(tmp_path, mixed_precision="auto", steps=2)
    path, log = write_order(order, tmp_path / "order.json"), tmp_path / "train.log"
    train(path, log=log, receipt=tmp_path / "receipt.json")
    major, _ = torch.cuda.get_device_capability()
    record = Record.read(RunFiles(order).record)
    assert record is not None
    assert record.mixed_precision == ("bf16" if major >= 8 or torch.version.hip else "fp16")
    train(path, log=log, receipt=tmp_path / "receipt.json")
    assert "already trained" in log.read_text()


def test_a_micro_batch_goes_to_the_device_without_waiting(tmp_path: Path) -> None:
    order = make_order(tmp_path)
    objective = Objective(order)
    batch = Caches(read_items(Path(order.manifest))).batch([0], pin=True)
    drawn = objective.draw(batch.latents.shape, torch.Generator())
    noise, timesteps = (each.pin_memory() for each in drawn)

    def network(sample: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor]:
        return (sample,)

    def losses() -> torch.Tensor:
        return losses_by(objective, network, batch, noise, timesteps, device="cuda")[0]

    expected = losses()  # the schedule's numbers come to the device once
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = losses()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(found, expected)


@pytest.mark.parametrize("optimizer", ["adamw", "adamw8bit"])
def test_a_deterministic_training_resumes_to_the_bit(tmp_path: Path, optimizer: str) -> None:
    if optimizer == "adamw8bit" and find_spec("bitsandbytes") is None:
        pytest.skip("bitsandbytes is not installed")
    settings: dict[str, Any] = {
        "learning_rate": 1e-2,
        "optimizer": optimizer,
        "mixed_precision": "bf16",
        "deterministic": True,
        "checkpointing_steps": 5,
        "dataloader_num_workers": 2,
    }

    def run(output: str, steps: int) -> Path:
        order = make_order(tmp_path, **{**settings, "steps": steps}, output=output)
        path = write_order(order, tmp_path / "order.json")
        train(path, log=tmp_path / "train.log", receipt=tmp_path / "receipt.json")
        return RunFiles(order).weights

    expected = run("whole", 9).read_bytes()
    run("longer", 5)
    assert run("longer", 9).read_bytes() == expected
    assert "resumed from step 5" in (tmp_path / "train.log").read_text()


def test_a_step_that_fp16_skips_advances_no_learning_rate(tmp_path: Path) -> None:
    order = make_order(tmp_path, mixed_precision="fp16", lr_scheduler="linear", ema_decay=0.9)
    learner = make_training(order).learner
    for factor, moves in ((1.0, True), (math.inf, False), (1.0, True)):
        before = learner.rate
        loss = sum(each.square().sum() for each in learner.parameters)
        learner._accelerator.backward(factor * loss)
        learner.clip()
        learner.step()
        assert (learner.rate != before) == moves
    assert learner.state()[1]["average"]["optimization_step"] == 2


def test_a_compiled_network_learns(tmp_path: Path) -> None:
    order = make_order(tmp_path, steps=40, learning_rate=3e-3, torch_compile=True, adapter="full")
    path, receipt = write_order(order, tmp_path / "order.json"), tmp_path / "receipt.json"
    train(path, log=tmp_path / "train.log", receipt=receipt)  # by `accelerate launch`
    result = json.loads(receipt.read_text())
    assert result["loss_end"] < result["loss_start"]
