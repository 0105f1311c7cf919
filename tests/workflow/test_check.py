"""`latentmake check` encodes nothing; what a training lacks is said before anything is encoded."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
import sdscripts
import torch
import wan
import world
from project import Project
from safetensors.torch import save_file

LACKING = {"optimizer": "adamw8bit", "accelerate_config": None}


@pytest.fixture
def of_wan(wan_model: Path, tmp_path: Path) -> Project:
    project = wan.make(tmp_path / "project", wan_model)
    wan.with_trainer(project)
    return project


def checked(project: Project, *, failing: bool = False) -> str:
    """Check a run of which nothing is cached; return what was said."""
    result = project.ask("check", "tiny", check=False)
    assert result.returncode == failing, result.output
    assert not (project / "cache").exists()
    return result.output


def refused(project: Project, *words: str) -> None:
    """Plan a training, which is refused in one line with some words."""
    line = project.refusal("train_tiny")
    assert all(word in line for word in ("error: ", *words)), line


def test_a_run_without_caches_is_checked_and_nothing_is_encoded(of_wan: Project) -> None:
    said = checked(of_wan)
    assert "0 fresh, 0 stale, 6 missing" in said
    for what in ("items", "manifest", "model: dit", "environment", "attention", "arguments"):
        assert f"\n{what} " in said
    of_wan.configure(lambda values: values["runs"]["tiny"]["trainer"].update(arguments=["--no"]))
    assert "does not know --no:" in checked(of_wan, failing=True)


def test_every_kind_of_run_is_checked(
    fresh: Callable[[], Project], micro: Path, tmp_path: Path
) -> None:
    project = fresh()
    assert "caches: shapes/micro/text" in checked(project)
    (project / "data/shapes/ant.png").unlink()
    (project / "data/shapes/ant.png").mkdir()
    trainer = {**world.training(), "accelerate_config": "none.yaml"}
    project.configure(lambda values: values["runs"]["tiny"].update(trainer=trainer))
    assert "none.yaml does not exist: correct `accelerate_config`" in checked(project, failing=True)
    refused(project, "none.yaml", "does not exist")
    if find_spec("bitsandbytes") is None:
        project.configure(lambda values: values["runs"]["tiny"]["trainer"].update(LACKING))
        refused(project, "environment: bitsandbytes is not installed")
    other = sdscripts.make(tmp_path / "other", micro)
    sdscripts.with_trainer(other)
    assert "it knows all flags" in checked(other)
    vae = {"encoder.conv_norm_out.weight": torch.ones(2)}
    for words, change in (
        (["--masked_los", "did you mean --masked_loss"], {"arguments": ["--masked_los"]}),
        (["lacks xformers: install it there"], {"attention": "xformers"}),
        (["base.safetensors: holds no network of sd1, but a VAE"], {}),
    ):
        if not change:
            save_file(vae, other / "models/base.safetensors")
        trainer = {"kind": "sdscripts", "max_train_epochs": 1, **change}
        other.configure(lambda values, to=trainer: values["runs"]["tiny"].update(trainer=to))
        refused(other, *words)


def test_caches_are_counted_by_what_they_are(fresh: Callable[[], Project]) -> None:
    project = fresh()
    project.run("caches_tiny")
    (project / "data/shapes/ant.txt").write_text("another")
    (project / project.latents("bee").pop()).unlink()
    said = project.ask("check").output
    assert "5 fresh, 1 stale (1 edited), 0 missing" in said
    assert "5 fresh, 0 stale, 1 missing" in said
    assert "6 fresh, 0 stale, 0 missing" in said


def test_what_a_training_lacks_is_said_while_planning(of_wan: Project) -> None:
    trainer = of_wan.config["runs"]["tiny"]["trainer"]
    for change, words in (
        ({"arguments": ["--fp8_bas"]}, ["--fp8_bas", "did you mean --fp8_base"]),
        ({"arguments": ["--output_name", "x"]}, ["runs.tiny.trainer", "leave out --output_name"]),
    ):
        changed = {**trainer, **change}
        of_wan.configure(lambda values, to=changed: values["runs"]["tiny"].update(trainer=to))
        refused(of_wan, *words)
        assert not (of_wan / "cache").exists()


def test_the_trainer_is_asked_again_only_where_its_environment_changed(of_wan: Project) -> None:
    calls = of_wan / "calls"
    python = of_wan / "environment/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\necho called >> {calls}\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    of_wan.configure(lambda values: values["musubi_tuner"].update(venv="environment"))
    of_wan.run("-n", "train_tiny")
    first = calls.read_text()
    of_wan.run("-n", "train_tiny")
    assert calls.read_text() == first
    (of_wan / "musubi-tuner/new_package.py").write_text("")
    of_wan.run("-n", "train_tiny")
    assert len(calls.read_text()) > len(first)
