"""The trainer `wan` takes its network in any form, and says while planning what it cannot train."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import wan
import wan_world
import world
from dit_world import forms, image_dit, tiny_dit, write_file
from project import Project

FOLDER = "models/wan/dit/folder"


@pytest.fixture
def project(tmp_path: Path) -> Project:
    folder = tmp_path / "wan"
    wan_world.write_wan_vae(folder)
    wan_world.write_umt5(folder)
    forms(tiny_dit(num_layers=1), folder / "dit")
    values = wan.config(dit=FOLDER)
    values["runs"]["tiny"] |= {
        "resolutions": [[48, 32]],
        "trainer": {"kind": "wan", "rank": 2, "steps": 1, "mixed_precision": "no"},
    }
    project = Project.make(tmp_path / "project", values, folder)
    world.draw(project / "data/shapes/ant.png", 0, (48, 32))
    (project / "data/shapes/ant.txt").write_text("an ant", encoding="utf-8")
    return project


def of_dit(project: Project, path: str, **changes: Any) -> None:
    project.configure(lambda values: values["models"]["wan"].update(dit=path, **changes))


def of_trainer(project: Project, **changes: Any) -> None:
    project.configure(lambda values: values["runs"]["tiny"]["trainer"].update(changes))


def refused(project: Project, *words: str) -> None:
    """Ask for a training, which is refused in one line before anything is encoded."""
    line = project.refusal("train_tiny")
    assert all(word in line for word in ("error: ", *words)), line
    assert not (project / "cache").exists()


def test_what_cannot_be_trained_is_said_before_anything_is_encoded(project: Project) -> None:
    state = tiny_dit(num_layers=1).state_dict()
    name = "blocks.0.attn1.to_q.weight"
    fp8 = project / "models/wan/fp8/dit.safetensors"
    write_file({**state, name: state[name].to(torch.float8_e4m3fn)}, fp8)
    shutil.copy(project / FOLDER / "config.json", fp8.parent)
    image_dit().save_pretrained(project / "models/wan/image")
    for path, words in (
        ("models/wan/fp8/dit.safetensors", [f"holds {name} in fp8"]),
        ("models/wan/image", ["36 input channels; t2v-1.3B has 16"]),
    ):
        of_dit(project, path)
        refused(project, "models.wan.dit", path, *words)
    of_dit(project, FOLDER)
    of_trainer(project, target_modules=["to_q", "to_qq"])
    refused(project, "runs.tiny.trainer.target_modules", "no layer of the DiT is named `to_qq`")


def test_the_same_files_in_another_place_train_nothing_again(project: Project) -> None:
    assert "train_tiny" in project.run("train_tiny").jobs
    of_dit(project, "models/wan/dit/pipeline")
    assert project.run("train_tiny").idle
    said = project.ask("check").output
    assert "models/wan/dit/pipeline/transformer: Wan DiT" in said
    of_dit(project, "models/wan/dit/comfyui_file/dit.safetensors")
    assert "train_tiny" in project.run("-n", "-p", "train_tiny").jobs
    # The trainer `musubi` knows the original names alone.
    of_dit(project, FOLDER)
    wan.with_trainer(project)
    project.ask("check", check=False).one_line("dit", "is in diffusers' names")
