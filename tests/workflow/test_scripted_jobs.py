"""Builds whose caches musubi-tuner's scripts make: side by side on GPUs, and past a bad item."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fast_tuner
import scripts_world
from project import Project

TUNER = "musubi-tuner"
CAPTIONS = {stem: f"a {stem}" for stem in scripts_world.STEMS}


def project_of(folder: Path, *, batch: dict[str, Any] | None = None) -> Project:
    fast_tuner.write_weights(
        folder / "tiny", vae="encoder.conv_in.weight", text="model.layers.0.mlp.up_proj.weight"
    )
    values = fast_tuner.config(
        "z_image", vae="models/tiny/vae.safetensors", text="models/tiny/text.safetensors"
    )
    values["datasets"]["shapes"]["fit"] = "crop"
    values["runs"]["tiny"]["resolutions"] = [64]
    if batch:
        values["batch"] = batch
    project = Project.make(folder / "project", values, folder / "tiny")
    fast_tuner.write_pictures(project / "data/shapes", CAPTIONS, (80, 64))
    return project


def test_jobs_of_scripts_run_side_by_side_on_all_gpus(tmp_path: Path) -> None:
    project = project_of(tmp_path, batch={"items": 3})
    scripts_world.install(project / TUNER)
    project.meet_in_script("encode.py", 2, "/64")
    project.run("--cores", "4", "caches_tiny", CUDA_VISIBLE_DEVICES="4,6")
    assert {*project.met()} == {"4", "6"}
    calls = scripts_world.calls(project / TUNER)
    assert len(calls) == 4  # two of latents and two of captions
    assert {call["gpu"] for call in calls[:2]} == {"4", "6"}
    for script in (scripts_world.LATENTS, scripts_world.TEXT):
        asked = [scripts_world.stems(call) for call in calls if call["script"] == script]
        assert sorted(stem for (stems,) in asked for stem in stems) == sorted(CAPTIONS)


def test_an_item_that_a_script_dies_of_is_named_and_the_rest_is_built(tmp_path: Path) -> None:
    project = project_of(tmp_path)
    scripts_world.install(project / TUNER, dog="raise")
    result = project.run("caches_tiny", check=False)
    assert result.returncode != 0
    result.one_line("1 of 6 items are faulty", "data/shapes/dog.png", "Kernel size")
    project.configure(lambda x: x["datasets"]["shapes"].update(on_error="skip"))
    project.run("caches_tiny")
    aside = [row for row in project.manifest() if "aside" in row]
    assert {row["stem"] for row in aside} == {"dog"} and "Kernel size" in aside[0]["aside"]
    before = len(scripts_world.calls(project / TUNER))
    scripts_world.set_moods(project / TUNER)
    project.run("caches_tiny")
    calls = scripts_world.calls(project / TUNER)[before:]
    asked = {call["script"]: scripts_world.stems(call) for call in calls}
    assert asked[scripts_world.LATENTS] == [["dog"]]
    assert project.run("caches_tiny").idle
