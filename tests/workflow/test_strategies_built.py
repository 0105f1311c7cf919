"""Caches by sd-scripts' own classes, built and trained on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import sdscripts_world
import strategies_world
from project import NOTHING, Project
from strategies_world import STEMS, set_moods


@pytest.fixture
def project(tmp_path: Path, micro: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    """A project of Lumina with two texts of each picture, and an sd-scripts that trains nothing."""
    made = Project.make(tmp_path / "project", {}, micro)
    monkeypatch.chdir(made.folder)
    values = strategies_world.make(text_arguments=["--system_prompt", "draw"])
    sdscripts_world.stand_in(Path("sd-scripts"), own_venv=False)
    captions = {"variants": 2, "caption_separator": " ", "shuffle_caption": True}
    values["datasets"]["shapes"]["captions"] = captions
    values["runs"]["tiny"]["trainer"] = {"kind": "sdscripts", "max_train_epochs": 1}
    made.config = values
    return made


def test_a_training_encodes_what_is_stale_and_each_edit_encodes_what_it_shapes(
    project: Project,
) -> None:
    result = project.run("train_tiny")
    assert result.encoded("latents").encoded == 6 and result.encoded("text").encoded == 12
    said = json.loads((project / "sd-scripts/called.json").read_bytes())
    arguments = said["argv"]
    assert arguments[arguments.index("--system_prompt") + 1] == "draw"
    assert arguments[arguments.index("--gemma2") + 1].endswith("models/gemma.safetensors")
    assert arguments[arguments.index("--network_module") + 1] == "networks.lora_lumina"
    assert len(said["items"]) == 12
    assert project.run("train_tiny").idle

    before = project.snapshot()
    (project / "data/ant.txt").write_text("two words")
    set_moods(project / "sd-scripts", cat="raise")
    strategies_world.repaint(project / "data/cat.png")
    result = project.run("caches_tiny", check=False)
    assert result.returncode
    result.one_line("1 of 1 items are faulty: data/cat.png", "RuntimeError: Kernel size")
    set_moods(project / "sd-scripts")
    project.run("caches_tiny")
    changed = project.changed(before)
    texts = {f"cache/shapes/tiny/{part}/ant_lumina_te.npz" for part in ("text", "text.1")}
    assert changed.content == texts | {"cache/shapes/tiny/64/cat_0080x0064_lumina.npz"}
    assert not (changed.added or changed.removed or changed.rewritten)
    assert project.run("caches_tiny").idle

    before = project.snapshot()
    with (project / "sd-scripts/library/train_util.py").open("a") as file:
        file.write("# an update\n")
    result = project.ask("status")
    result.one_line("recipe: sd-scripts's digest ", "12 texts of shapes")
    assert project.changed(before) == NOTHING
    assert {*STEMS} == {row["stem"] for row in project.manifest()}
