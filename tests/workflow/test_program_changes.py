"""An update of musubi-tuner: what its caching scripts import decides, and the plan says so."""

from __future__ import annotations

from pathlib import Path

import fast_tuner
import pytest
from latentmake.config.architectures import MUSUBI
from project import Project

CAPTIONS = {"ant": "a red circle", "bee": "a blue square", "cat": "a green star"}


@pytest.fixture
def project(tmp_path: Path) -> Project:
    fast_tuner.write_weights(tmp_path / "tiny", vae="encoder", text="embedding")
    places = {"vae": "models/tiny/vae.safetensors", "text": "models/tiny/text.safetensors"}
    project = Project.make(
        tmp_path / "project", fast_tuner.config("z_image", **places), tmp_path / "tiny"
    )
    fast_tuner.write_pictures(project / "data/shapes", CAPTIONS, (96, 64))
    fast_tuner.install(project / "musubi-tuner", MUSUBI["z_image"])
    project.run("caches_tiny")
    assert project.run("caches_tiny").idle
    return project


def append(path: Path) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write("# of another version\n")


def test_an_update_encodes_what_its_sources_encode_and_the_plan_says_so(
    project: Project,
) -> None:
    tuner = project / "musubi-tuner"
    before = project.snapshot()
    # No caching script imports these.
    append(tuner / fast_tuner.OTHER_MODULE)
    append(tuner / "src/musubi_tuner/zimage_train_network.py")
    (tuner / "src/musubi_tuner/wan_cache_latents.py").write_text("import argparse\n")
    assert project.run("caches_tiny").idle

    append(tuner / fast_tuner.TEXT_MODULE)
    planned = project.run("-n", "caches_tiny")
    words = ("recipe: musubi-tuner's digest ", " -> ", ": 6 texts of ")
    planned.one_line(*words)
    assert {kind for (_, kind), row in planned.table().items() if row["changed recipe"]} == {
        "text 64",
        "text 96",
    }
    project.ask("status").one_line(*words)
    done = project.run("caches_tiny")
    assert done.encoded("text").encoded == 3 and done.encoded("latents").encoded == 0
    assert all("_te." in name for name in project.changed(before).rewritten)
    assert project.run("caches_tiny").idle

    # Two files, and an edited caption that does not hide the reason.
    append(tuner / fast_tuner.VAE_MODULE)
    append(tuner / "src/musubi_tuner/zimage_cache_latents.py")
    (project / "data/shapes/ant.txt").write_text("a purple circle", encoding="utf-8")
    planned = project.run("-n", "caches_tiny")
    planned.one_line("recipe: musubi-tuner's digest ", ": 6 latents of ")
    assert "texts of" not in planned.output

    explained = project.ask("explain", "data/shapes/ant.png")
    assert explained.output.count("musubi-tuner's digest ") == 2  # of two resolutions
    assert explained.output.count('caption "a red circle" -> "a purple circle"') == 2
    explained.one_line("made", "by musubi-tuner")

    project.run("caches_tiny")
    assert project.run("caches_tiny").idle
