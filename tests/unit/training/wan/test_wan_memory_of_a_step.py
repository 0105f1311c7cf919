"""A step of the trainer `wan` takes the memory that was told, and keeps nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import wan_trainer_world
from accelerate.state import AcceleratorState
from dit_world import tiny_dit
from latentmake.training.wan.dit import check_targets, read_dit
from latentmake.training.wan.estimate import training_memory
from memory_world import Living
from wan_trainer_world import make_order, make_training

LATENT = (3, 16, 24)
USUAL = ["to_q", "to_k", "to_v", "to_out.0"]
OUTER, ALL = [*USUAL, "proj_out"], [*USUAL, "ffn.net.0.proj", "ffn.net.2"]


@pytest.fixture(autouse=True)
def other_precision() -> Iterator[None]:
    """Let this process train with other settings before and after."""
    AcceleratorState._reset_state(True)
    yield
    AcceleratorState._reset_state(True)


@pytest.mark.parametrize(
    "changes",
    [{}, {"lora_dropout": 0.5, "target_modules": OUTER}, {"rank": 32, "target_modules": ALL}],
    ids=["usual", "outer", "feed-forward"],
)
@pytest.mark.parametrize("gradient_checkpointing", [True, False])
def test_a_step_takes_the_memory_that_was_told(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    gradient_checkpointing: bool,
    changes: dict[str, Any],
) -> None:
    monkeypatch.setattr(wan_trainer_world, "SHAPES", {"image": LATENT, "clip": LATENT})
    dit = tiny_dit(heads=2, head=128, num_layers=4, ffn_dim=1024)
    dit.to(torch.bfloat16).save_pretrained(tmp_path / "dit")
    order = make_order(
        tmp_path,
        mixed_precision="bf16",
        gradient_checkpointing=gradient_checkpointing,
        steps=2,
        dataloader_num_workers=0,
        **{"rank": 8, **changes},
    )
    with Living() as living:
        training = make_training(order)
        network = training.learner.denoiser
        for parameter in network.parameters():
            living.add(parameter)
        batches = (training.caches.batch(each) for each in training.batch_order.batches(0, 1, 2))
        for step in (1, 2):
            living.peak = living.bytes
            training._one_step(step, batches)
    frozen = [each for each in network.parameters() if not each.requires_grad]
    assert all(each.grad is None for each in frozen)
    assert {each.dtype for each in frozen} == {torch.bfloat16, torch.float32}
    read = read_dit(str(tmp_path / "dit"))
    layers = check_targets(order.trainer.target_modules, read.shapes, "targets")
    told = training_memory(read.shapes, read.config, layers, LATENT, order.trainer)
    assert living.peak == pytest.approx(sum(told.values()), rel=0.1)
