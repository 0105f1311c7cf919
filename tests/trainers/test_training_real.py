"""The real training scripts train tiny networks of several architectures, and are resumed."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from conftest import Make, Weights, sources
from latentmake.config.machines import ExternalProgram
from latentmake.runs import history
from latentmake.trainers.init.local_models import model_at
from latentmake.trainers.musubi.backend import Musubi
from musubi_world import write_order
from real_models import CAPTION, STEMS
from rows_world import RUN, make_row_run
from safetensors import safe_open
from safetensors.torch import load_file

pytestmark = [pytest.mark.real_trainer, pytest.mark.usefixtures("own_folder")]

LOG, RECEIPT = Path("logs/train.log"), Path(f"runs/{RUN}/trained.json")
TRAINED = [
    ("z_image", ""),
    ("qwen_image", ""),
    ("qwen_image_edit", "edit-2509"),
    ("qwen_image_layered", ""),
    ("flux_2_klein_4b", "klein-base-4b"),
    ("flux_kontext", ""),
    ("krea2", ""),
    ("ideogram4", ""),
    ("kandinsky5", "k5-lite-t2v-5s-sd"),
]


def make_project(
    folder: Path, name: str, task: str, venv: Path, weights: Path, **trainer: object
) -> Path:
    """Write a run with a tiny network into a folder, the working directory; return its order."""
    order = make_row_run(
        folder,
        name,
        task,
        tuner=sources("musubi-tuner"),
        network_dim=2,
        attention="sdpa",
        max_data_loader_n_workers=0,
        **trainer,
    )
    shutil.copyfile(weights / "dit.safetensors", "models/dit.safetensors")
    assert order.program is not None
    place = ExternalProgram(path=order.program.path, venv=os.fspath(venv))
    return write_order(order.model_copy(update={"program": place}), Path("order.json"))


@pytest.mark.parametrize(("name", "task"), TRAINED)
def test_each_trains_and_then_has_nothing_to_do(
    tmp_path: Path, forked_venv: Path, tiny_weights: Weights, name: str, task: str
) -> None:
    weights = tiny_weights(f"{name}_dit")
    network = shutil.copy(weights / "dit.safetensors", f"{name}.safetensors")
    assert model_at(Path(network)).architecture.name == name  # as `latentmake init` asks
    order = make_project(tmp_path, name, task, forked_venv, weights)
    Musubi().train(order, log=LOG, receipt=RECEIPT)
    lora = load_file(f"runs/{RUN}/{RUN}.safetensors")
    raised = [value for key, value in lora.items() if key.endswith("lora_up.weight")]
    assert sum(bool(value.abs().max() > 0) for value in raised) > len(raised) / 2
    assert all(key.startswith("lora_unet_") for key in lora)
    (training,) = history.trainings(RUN)
    items = training.items or []
    assert {item.stem for item in items} == {"blue", "red"}
    assert training.record.ended == "" and training.weights
    Musubi().train(order, log=LOG, receipt=RECEIPT)
    assert "already trained on exactly this" in LOG.read_text()


@pytest.mark.parametrize("module", ["networks.loha", "networks.lokr"])
def test_another_network_is_trained_and_accepted(
    tmp_path: Path, forked_venv: Path, tiny_weights: Weights, module: str
) -> None:
    settings = {"network_module": module, "network_args": ["rank_dropout=0.1"]}
    weights = tiny_weights("z_image_dit")
    order = make_project(tmp_path, "z_image", "", forked_venv, weights, **settings)
    Musubi().train(order, log=LOG, receipt=RECEIPT)
    mark = {"networks.loha": ".hada_w1_a", "networks.lokr": ".lokr_w1"}[module]
    trained = load_file(f"runs/{RUN}/{RUN}.safetensors")
    assert any(name.endswith(mark) for name in trained)
    with safe_open(f"runs/{RUN}/{RUN}.safetensors", "pt") as file:
        assert file.metadata()["ss_network_module"] == module
    Musubi().train(order, log=LOG, receipt=RECEIPT)
    assert "already trained on exactly this" in LOG.read_text()


def test_one_command_caches_checks_and_trains_and_then_has_nothing_to_do(
    make_real: Make, tiny_weights: Weights
) -> None:
    project = make_real("qwen_image_edit").project
    network = tiny_weights("qwen_image_edit_dit") / "dit.safetensors"
    shutil.copyfile(network, project / "models/dit.safetensors")
    trainer = {"kind": "musubi", "network_dim": 2, "max_train_epochs": 1, "attention": "sdpa"}
    control = project / f"controls/{STEMS[0]}.png"
    trainer["samples"] = {"prompts": [f"a cat --ci {control}"], "num_inference_steps": 1}

    def train(config: dict[str, Any]) -> None:
        config["models"]["tiny"]["dit"] = "models/dit.safetensors"
        config["runs"]["real"]["trainer"] = trainer | {"max_data_loader_n_workers": 0}

    project.configure(train)
    done = project.run("train_real")
    assert done.returncode == 0, done.output[-3000:]
    assert len([*(project / "runs/real/output/sample").glob("*.png")]) == 2  # before and after
    lora = project / "runs/real/real.safetensors"
    assert all(key.startswith("lora_unet_") for key in load_file(lora))
    assert project.run("train_real").idle
    listed = project.ask("check", "real", check=False)
    assert listed.returncode == 0 and "failed" not in listed.output, listed.output[-3000:]
    assert "Wan" not in listed.output
    stat = lora.stat().st_mtime_ns
    (project / f"data/{CAPTION}.txt").write_text("another caption")
    assert project.run("train_real").returncode == 0
    assert lora.stat().st_mtime_ns != stat
    assert project.run("train_real").idle
