"""Items with two control images: what a control, a caption or a picture changes, and bad input."""

from __future__ import annotations

from pathlib import Path

import fast_tuner
import pytest
import world
from latentmake.config.architectures import MUSUBI
from project import NOTHING, Project

EDIT = "qwen_image_edit"
CAPTIONS = {"ant": "a red circle", "bee": "a blue square", "cat": "a green star"}


@pytest.fixture
def project(tmp_path: Path) -> Project:
    fast_tuner.write_weights(tmp_path / "tiny", vae="encoder", text="embedding")
    places = {"vae": "models/tiny/vae.safetensors", "text": "models/tiny/text.safetensors"}
    values = fast_tuner.config(EDIT, task="edit-2509", **places)
    values["datasets"]["shapes"]["control_directory"] = "data/control"
    project = Project.make(tmp_path / "project", values, tmp_path / "tiny")
    fast_tuner.write_pictures(project / "data/shapes", CAPTIONS, (96, 64))
    for number, stem in enumerate(CAPTIONS):
        for control in range(2):
            size = (40 + 20 * control, 50)
            world.draw(project / f"data/control/{stem}_{control}.png", 2 * number + control, size)
    fast_tuner.install(project / "musubi-tuner", MUSUBI[EDIT])
    project.run("caches_tiny")
    return project


def of(*stems: str) -> set[str]:
    """Return the latents and texts of some items at both resolutions."""
    return {
        f"cache/shapes/tiny/{size}/{stem}{ending}"
        for size in (64, 96)
        for stem in stems
        for ending in ("_0096x0064_qie.safetensors", "_qie_te.safetensors")
    }


def test_a_control_changes_latents_and_text_of_its_item_alone(project: Project) -> None:
    rows = project.manifest()
    assert [row["controls"] for row in rows] == [
        [f"data/control/{stem}_{number}.png" for number in range(2)] for stem in CAPTIONS
    ]
    assert all(row["control"] == row["controls"][0] for row in rows)
    assert set(project.cache_files()) == of(*CAPTIONS)

    before = project.snapshot()
    world.draw(project / "data/control/bee_1.png", 9, (60, 50))
    project.run("caches_tiny")
    assert project.changed(before).content == of("bee")
    assert project.run("caches_tiny").idle

    before = project.snapshot()
    (project / "data/control/ant_1.png").rename(project / "data/control/ant_5.png")
    project.run("caches_tiny")
    assert project.changed(before) == NOTHING
    assert project.manifest()[0]["controls"][1] == "data/control/ant_5.png"

    (project / "data/control/cat_0.png").unlink()
    (project / "data/control/cat_1.png").unlink()
    world.draw(project / "data/control/ant_sketch.png", 1)
    result = project.run("-n", "caches_tiny", check=False)
    assert "data/shapes/cat.png: has no control in data/control" in result.output
    assert "data/control/ant_sketch.png, whose name does not end in a number" in result.output

    project.configure(lambda values: values["datasets"]["shapes"].update(on_error="skip"))
    (project / "data/control/ant_sketch.png").unlink()
    damaged = project / "data/control/bee_0.png"
    damaged.write_bytes(damaged.read_bytes()[:60])
    done = project.run("caches_tiny")
    done.one_line("skipped: data/control/bee_0.png: ")
    assert {row["stem"] for row in project.manifest() if "aside" not in row} == {"ant"}
    assert project.run("caches_tiny").idle
