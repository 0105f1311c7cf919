"""A training is named by its run, by a number of trainings ago, or by its weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from latentmake.base import digest
from latentmake.base.errors import TrainingError
from latentmake.commands.named_trainings import finished, training_of
from latentmake.config.root import Config, parse
from latentmake.runs.order import Record
from safetensors.torch import save_file

pytestmark = pytest.mark.usefixtures("own_folder")


def config() -> Config:
    run = {"datasets": "cats", "model": "m", "resolutions": 64}
    model = {"vae": "vae", "text": "text", "unet": "unet"}
    datasets = {"cats": {"path": "data/cats"}}
    return parse({"datasets": datasets, "models": {"m": model}, "runs": {"cats": run}})


def train(number: int, ended: str = "", **files: str) -> Record:
    record = Record(
        parts={"settings": number}, seconds=1, began=number, roster="r", ended=ended, files=files
    )
    folder = Path(f"runs/cats/history/{number:016}")
    folder.mkdir(parents=True)
    record.write(folder / "training.json")
    return record


def numbers() -> list[object]:
    return [training.record.parts["settings"] for training in finished("cats")]


def test_trainings_count_back_from_the_present_result() -> None:
    records = [train(number) for number in (1, 2, 3)]
    train(4, "it was killed")
    assert numbers() == [3, 2, 1]
    assert [training.name for training in finished("cats")] == ["cats", "cats@1", "cats@2"]
    records[0].write(Path("runs/cats/training.json"))  # the weights were taken back
    assert numbers() == [1, 3, 2]
    assert training_of(config(), "cats@2").record == training_of(config(), "cats@02").record
    with pytest.raises(TrainingError, match="cats@3: the history of cats has 3 finished trainings"):
        training_of(config(), "cats@3")


def test_weights_name_their_training_by_their_header_or_by_their_digest() -> None:
    save_file({"x": torch.ones(1)}, "plain.safetensors")
    named = {"latentmake.training": f"{2:016}"}
    save_file({"x": torch.zeros(1)}, "named.safetensors", metadata=named)
    train(1, lora=digest.of_file(Path("plain.safetensors")))
    train(2)
    for name, number in (("plain.safetensors", 1), ("named.safetensors", 2)):
        assert training_of(config(), name).record.parts == {"settings": number}
    Path("broken.safetensors").write_bytes(b"no weights")
    with pytest.raises(TrainingError, match="no training in runs/"):
        training_of(config(), "broken.safetensors")
