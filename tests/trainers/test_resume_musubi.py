"""musubi-tuner's own code, killed and resumed: a small random DiT on a CPU."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from conftest import Find, steps, write_wan_dit
from latentmake.base.errors import TrainingError
from latentmake.config.machines import ExternalProgram
from latentmake.trainers.musubi.backend import Musubi as Trainer
from musubi_world import RUN, make_run, write_order
from safetensors.torch import load_file

pytestmark = pytest.mark.real_trainer

WORK = Path(f"runs/{RUN}/output")
LOG = Path("logs/train.log")
RECEIPT = Path(f"runs/{RUN}/trained.json")


def test_a_killed_training_is_resumed_by_number_and_ends_with_its_last_epoch(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    trainer: Find,
) -> None:
    tuner = trainer("musubi-tuner", "wan_train_network.py")
    root = tmp_path / "project"
    root.mkdir()
    monkeypatch.chdir(root)
    settings = {"max_train_epochs": 4, "save_every_n_epochs": 1, "network_dim": 2}
    order = make_run(
        root, mixed_precision="no", attention="sdpa", max_data_loader_n_workers=0, **settings
    )
    write_wan_dit(tuner, "models/dit.safetensors")
    place = ExternalProgram(path=os.fspath(tuner.folder), venv=os.fspath(tuner.python))
    order = order.model_copy(update={"program": place})
    path = write_order(order, Path("order.wan.json"))

    monkeypatch.setenv("DIES_AFTER", f"{RUN}-000002-state")
    with pytest.raises(TrainingError):
        Trainer().train(path, log=LOG, receipt=RECEIPT)
    monkeypatch.delenv("DIES_AFTER")
    os.utime(WORK / f"{RUN}-000001-state")  # now the newest
    saved = [(WORK / f"{RUN}-00000{epoch}.safetensors").read_bytes() for epoch in (1, 2)]
    Trainer().train(path, log=LOG, receipt=RECEIPT)
    assert f"resumed from {WORK}/resumed/000000/{RUN}-000002-state" in LOG.read_text()
    assert "2 epochs are done" in LOG.read_text()
    assert steps(WORK / f"{RUN}-state") == 4 * 3
    epochs = sorted(WORK.glob(f"{RUN}-0*.safetensors"))
    assert [path.name for path in epochs] == [f"{RUN}-00000{x}.safetensors" for x in (1, 2, 3)]
    assert [path.read_bytes() for path in epochs[:2]] == saved
    lora = load_file(WORK / f"{RUN}.safetensors")
    assert (WORK / f"{RUN}.safetensors").stat().st_mode & 0o777 == 0o644

    # Killed behind the last state: nothing is trained, and the LoRA is written from it.
    for file in (WORK / f"{RUN}.safetensors", Path(order.output) / f"{RUN}.safetensors"):
        file.unlink()
    Trainer().train(path, log=LOG, receipt=RECEIPT)
    assert "4 epochs are done" in LOG.read_text()
    again = load_file(WORK / f"{RUN}.safetensors")
    assert again.keys() == lora.keys()
    assert all(torch.equal(again[name], lora[name]) for name in lora)
