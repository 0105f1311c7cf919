"""Every key about videos, changed on a built run of Wan that musubi-tuner trains."""

from __future__ import annotations

import sys
from pathlib import Path

import every_key
import musubi_world
import pytest
import video_world
import wan
from every_key import Change, Key, nothing, refused
from project import Project

MODEL = "wan"
TRAINER = "MusubiTrainer"


@pytest.fixture(scope="session")
def key_template(tmp_path_factory: pytest.TempPathFactory, wan_model: Path) -> Project:
    """A run trained on clips of one video. Not to be changed: copy it."""
    values = wan.config()
    values["datasets"]["shapes"] = {"path": "data/shapes", "target_frames": [1, 5]}
    values["runs"]["tiny"] |= {
        "resolutions": [64],
        "trainer": {"kind": "musubi", "max_train_epochs": 1, "network_dim": 4},
    }
    values["musubi_tuner"] = {"path": "musubi-tuner", "venv": str(Path(sys.prefix))}
    project = Project.make(tmp_path_factory.mktemp("keys") / "project", values, wan_model)
    musubi_world.stand_in(project / "musubi-tuner", own_venv=False)
    folder = project / "data/shapes"
    folder.mkdir(parents=True)
    video_world.write_video(folder / "walk.mp4", "mpeg4", 16, size=(96, 48))
    (folder / "walk.txt").write_text("a walk\n", encoding="utf-8")
    project.run("train_tiny")
    return project


CHANGES: dict[Key, Change] = {
    ("datasets", "target_frames"): Change([1, 9]),
    ("datasets", "frame_extraction"): Change("chunk"),
    ("datasets", "frame_stride"): Change(2, before={"frame_extraction": "slide"}),
    ("datasets", "frame_sample"): Change(3, before={"frame_extraction": "uniform"}),
    ("datasets", "max_frames"): Change(9, before={"frame_extraction": "full"}),
    ("datasets", "source_fps"): Change(24.0),
    ("datasets", "sample_stride"): Change(2),
    ("datasets", "display_rotation"): nothing(True, "no video here is turned"),
    ("datasets", "short_videos"): nothing("error", "no video here is too short"),
    ("datasets", "fit"): Change("crop"),
    ("datasets", "bucket_no_upscale"): refused(True, "bucket_no_upscale"),
}

test_a_key_makes_what_it_shapes_stale_and_nothing_else = every_key.one_by_one(
    CHANGES, MODEL, TRAINER
)
test_a_key_that_needs_another_is_asked_after_it = every_key.after_others(CHANGES, MODEL, TRAINER)
