"""Devices of a training: its processes share the cores, its precision is chosen once and stays."""

from __future__ import annotations

import shutil
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from latentmake.base import digest
from latentmake.base.errors import DeviceError, TrainingError
from latentmake.config.trainers import SdTrainer
from latentmake.runs.order import Record, RunFiles, lock_of
from latentmake.trainers.loop import launch, recipe
from latentmake.trainers.loop.checkpoint import Progress, as_begun
from latentmake.trainers.loop.recipe import decided, make_accelerator
from latentmake.trainers.sd.unet import SdOrder
from trainer_world import make_order, train, write_order


@pytest.mark.parametrize(("processes", "each"), [(4, 2), (1, 8)])
def test_each_process_gets_its_share_of_the_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processes: int, each: int
) -> None:
    seen: list[int] = []

    def launched(_: list[str], *, threads: int, **__: Any) -> None:
        seen.append(threads)
        raise KeyboardInterrupt  # there are no four GPUs to go on with

    monkeypatch.setattr(launch, "run_child", launched)
    path = write_order(make_order(tmp_path), tmp_path / "order.json")
    log, receipt = tmp_path / "log", tmp_path / "receipt.json"
    with pytest.raises(KeyboardInterrupt):
        train(path, log=log, receipt=receipt, processes=processes, threads=8)
    assert seen == [each]


def in_precision(folder: Path, precision: str) -> SdOrder:
    settings: dict[str, Any] = {"steps": 4, "checkpointing_steps": 2, "checkpoints_total_limit": 9}
    return make_order(folder, mixed_precision=precision, **settings)


def test_a_training_that_chooses_its_precision_writes_it_down_and_keeps_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    auto = in_precision(tmp_path, "auto")
    path, log = write_order(auto, tmp_path / "order.json"), tmp_path / "log"
    receipt, files = tmp_path / "receipt.json", RunFiles(auto)
    train(path, log=log, receipt=receipt)
    assert "mixed_precision: no" in log.read_text()  # on a CPU
    record = Record.read(files.record)
    assert record is not None and record.mixed_precision == "no"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)  # another machine
    train(path, log=log, receipt=receipt)
    assert "already trained" in log.read_text()
    # A key that asks for another one counts.
    assert files.trained(in_precision(tmp_path, "no").wanted()) == record
    assert files.trained(in_precision(tmp_path, "bf16").wanted()) is None
    # Without its result the training goes on from its checkpoint, as it began.
    files.record.unlink()
    assert as_begun(auto, lock_of(auto.lock).data) == in_precision(tmp_path, "no")


@pytest.mark.parametrize("begun", ["no", "bf16"])
def test_what_earlier_releases_trained_stays_trained_and_resumes_as_it_began(
    begun: str, tmp_path: Path
) -> None:
    """Their digest left out `no`, the default, and their records name no precision."""
    auto = in_precision(tmp_path, "auto")
    files, settings = RunFiles(auto), {"kind": "sd", "train_batch_size": 2, "steps": 4}
    chosen = {} if begun == "no" else {"mixed_precision": begun}
    former = auto.wanted() | {"settings": digest.of_value([settings | chosen])}
    losses: dict[str, Any] = {"loss_start": 1.0, "seconds": 1.0}
    progress = Progress(parts=former, step=2, **losses)
    progress.write(files.checkpoints / "step-000002/progress.json")
    assert as_begun(auto, lock_of(auto.lock).data).trainer.mixed_precision == begun
    shutil.rmtree(files.checkpoints)
    assert as_begun(auto, lock_of(auto.lock).data) == auto
    record = Record(parts=former, steps=4, loss_end=0.5, **losses)
    record.write(files.record)
    files.weights.write_bytes(b"")
    known = as_begun(auto, lock_of(auto.lock).data)
    assert files.trained(known.wanted()) == record


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
