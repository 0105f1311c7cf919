"""Processes that train together wait for each other; the device decides the precision."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from latentmake.config.trainers import SdTrainer
from latentmake.errors import DeviceError, TrainingError
from latentmake.training.loop import recipe
from latentmake.training.loop.recipe import decided, make_accelerator
from trainer_world import make_order


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch sees a GPU")
def test_a_gpu_that_torch_does_not_see_is_refused_before_anything_is_trained(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    with pytest.raises(DeviceError, match=r"GPU 3: torch .* does not see it"):
        make_accelerator(SdTrainer(kind="sd", mixed_precision="no"))


@pytest.mark.parametrize(
    ("gpu", "has_bf16", "precision"),
    [(True, True, "bf16"), (True, False, "fp16"), (False, False, "no")],
    ids=["a GPU with bf16", "one without", "no GPU"],
)
def test_a_training_computes_in_bf16_where_the_device_has_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, gpu: bool, has_bf16: bool, precision: str
) -> None:
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    # Older GPUs emulate bf16, and torch says so if it is asked for that too.
    monkeypatch.setattr(
        torch.cuda,
        "is_bf16_supported",
        lambda including_emulation=True: has_bf16 or including_emulation,
    )
    found = decided(make_order(tmp_path, mixed_precision="auto"))
    assert found == make_order(tmp_path, mixed_precision=precision)
    explicit = make_order(tmp_path, mixed_precision="fp16")
    assert decided(explicit) == explicit


@pytest.mark.parametrize(("asked", "hint"), [("bf16", "fp16"), ("fp16", "no")])
def test_a_precision_that_the_device_lacks_is_named_with_one_that_it_has(
    monkeypatch: pytest.MonkeyPatch, asked: str, hint: str
) -> None:
    def refusing(**_: object) -> None:
        raise ValueError(f"{asked} mixed precision requires a supported device.")

    monkeypatch.setattr(recipe, "Accelerator", refusing)
    with pytest.raises(TrainingError, match=f"requires a supported device.*set it to `{hint}`"):
        make_accelerator(SdTrainer.model_validate({"kind": "sd", "mixed_precision": asked}))


def test_the_others_wait_for_the_first_process_and_nothing_shards_the_optimizer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Samples may take hours, which the first process draws while the others wait."""
    given: dict[str, Any] = {}

    def make(**options: Any) -> Any:
        given.update(options)
        return SimpleNamespace(distributed_type=SimpleNamespace(value="FSDP"))

    monkeypatch.setattr(recipe, "Accelerator", make)
    with pytest.raises(TrainingError, match="sd trainer does not train under FSDP"):
        make_accelerator(SdTrainer(kind="sd", mixed_precision="no"))
    assert given["kwargs_handlers"][0].timeout > timedelta(days=1)
