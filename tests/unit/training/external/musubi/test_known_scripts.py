"""A musubi-tuner that is too old for a model is named while planning."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from latentmake.config.machines import ExternalProgram
from latentmake.config.models import Model
from latentmake.errors import TrainingError
from latentmake.training.external.musubi.command import program_digest

SCRIPT = """
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--dataset_config")
parser.add_argument("--vae")
parser.add_argument("--text_encoder")
parser.add_argument("--num_workers")
parser.add_argument("--skip_existing", action="store_true")
parser.add_argument("--keep_cache", action="store_true")
parser.add_argument("--vae_tiling", action="store_true")
"""
VERSIONS = 'parser.add_argument("--model_version", choices=["original", "edit"])\n'
FILES = ("qwen_image_train_network.py", "qwen_image_cache_latents.py")


@pytest.fixture
def tuner(tmp_path: Path) -> ExternalProgram:
    package = tmp_path / "musubi-tuner/src/musubi_tuner"
    package.mkdir(parents=True)
    for name in FILES:
        (package / name).write_text(SCRIPT + VERSIONS)
    return ExternalProgram(path=str(tmp_path / "musubi-tuner"), venv=sys.prefix)


def model(architecture: str = "qwen_image", **more: Any) -> Model:
    return Model.model_validate({"architecture": architecture, "vae": "v", "text": "t", **more})


def refused(tuner: ExternalProgram, model: Model, kind: str = "latents") -> str:
    with pytest.raises(TrainingError) as caught:
        program_digest(tuner, model, kind)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_musubi_tuner_that_knows_a_model_has_a_digest(tuner: ExternalProgram) -> None:
    assert program_digest(tuner, model(latents_arguments=["--vae_tiling"]), "latents")


def test_a_missing_script_is_named_with_the_hint_to_update(tuner: ExternalProgram) -> None:
    line = refused(tuner, model(), "text")
    assert "qwen_image_cache_text_encoder_outputs.py" in line and "update it" in line
    line = refused(tuner, model("z_image"))
    assert "zimage_train_network.py" in line and "knows Z-Image" in line and "update it" in line


def test_a_folder_of_something_else_is_told_from_an_old_version(tmp_path: Path) -> None:
    line = refused(ExternalProgram(path=str(tmp_path), venv=sys.prefix), model())
    assert "update" not in line and "musubi_tuner.path" in line


def test_a_missing_flag_is_named(tuner: ExternalProgram) -> None:
    (Path(tuner.path) / "src/musubi_tuner" / FILES[1]).write_text(SCRIPT)
    line = refused(tuner, model())
    assert "too old for Qwen-Image" in line and "--model_version" in line and "update it" in line


def test_a_task_that_is_newer_than_the_script_is_named(tuner: ExternalProgram) -> None:
    assert program_digest(tuner, model("qwen_image_edit", task="edit"), "latents")
    line = refused(tuner, model("qwen_image_edit", task="edit-2511"))
    assert "too old for Qwen-Image-Edit edit-2511" in line and "edit-2511" in line


def test_a_further_argument_that_the_script_does_not_know_is_named(tuner: ExternalProgram) -> None:
    line = refused(tuner, model(latents_arguments=["--vae_tilling"]))
    assert "latents_arguments" in line and "did you mean --vae_tiling?" in line
