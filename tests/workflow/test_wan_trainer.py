"""A LoRA of Wan is trained in this environment from images and clips, and again only if need be."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import video_world
import wan
import wan_world
import world
from dit_world import tiny_dit
from project import Project
from safetensors.torch import load_file

WEIGHTS = "runs/tiny/pytorch_lora_weights.safetensors"
TRAINER: dict[str, Any] = {
    "kind": "wan",
    "rank": 2,
    "epochs": 3,
    "max_steps": 3,
    "mixed_precision": "no",
    "checkpointing_epochs": 1,
    "samples": {
        "prompts": ["a red circle"],
        "frames": 5,
        "num_inference_steps": 1,
        "every": 3,
        "resolution": [32, 32],
    },
}


def make_model(folder: Path) -> None:
    wan_world.write_wan_vae(folder)
    wan_world.write_umt5(folder)
    tiny_dit(num_layers=1).save_pretrained(folder / "dit")


@pytest.fixture
def project(tmp_path: Path) -> Project:
    make_model(tmp_path / "wan")
    values = wan.config(dit="models/wan/dit")
    values["datasets"]["films"] = {
        "path": "data/films",
        "target_frames": [5],
        "frame_extraction": "head",
    }
    values["runs"]["tiny"] |= {
        "datasets": ["shapes", "films"],
        "resolutions": [[64, 48]],
        "trainer": TRAINER,
    }
    project = Project.make(tmp_path / "project", values, tmp_path / "wan")
    for number, stem in enumerate(("ant", "bee")):
        world.draw(project / f"data/shapes/{stem}.png", number, (64, 48))
        (project / f"data/shapes/{stem}.txt").write_text(world.CAPTIONS[stem], encoding="utf-8")
    (project / "data/films").mkdir()
    video_world.write_video(project / "data/films/ray.mp4", "libx264", 8)
    (project / "data/films/ray.txt").write_text("moving colours", encoding="utf-8")
    return project


def weights(project: Project) -> tuple[str, int]:
    path = project / WEIGHTS
    return hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_mtime_ns


def test_a_lora_is_trained_and_only_what_shapes_it_trains_again(project: Project) -> None:
    result = project.run("train_tiny")
    assert "trains 768 of" in result.output
    receipt = json.loads((project / "runs/tiny/trained.json").read_bytes())
    assert (receipt["steps"], receipt["weights"]) == (3, WEIGHTS)
    folder = project / "runs/tiny"
    names = {"pytorch_lora_weights", "musubi", "comfyui"}
    assert {path.stem for path in folder.glob("*.safetensors")} == names
    assert any(load_file(project / WEIGHTS)[name].any() for name in load_file(project / WEIGHTS))
    clips = sorted(path.name for path in (folder / "samples").glob("*.mp4"))
    assert clips == ["step-000000_00.mp4", "step-000003_00.mp4"]
    assert (folder / "samples.png").is_file() and (folder / "curves.png").is_file()
    before = weights(project)
    again = project.run("train_tiny")
    assert again.idle, again.output

    # What shapes no weights trains nothing again, nor does a default that is written down.
    project.configure(lambda values: _trainer(values).update(checkpointing_steps=7, flow_shift=3))
    assert project.run("train_tiny").idle

    # A caption is encoded anew, and no clip; then the run is trained.
    (project / "data/films/ray.txt").write_text("other words", encoding="utf-8")
    edited = project.run("train_tiny")
    assert edited.encoded("text").encoded == 1
    assert edited.encoded("latents").encoded == 0
    assert weights(project)[0] != before[0]
    assert project.run("train_tiny").idle


def _trainer(values: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = values["runs"]["tiny"]["trainer"]
    return found
