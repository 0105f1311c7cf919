"""clips_{run}: clips of videos as .npz files and train.jsonl, and what own training loops read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import av
import cv2
import numpy as np
import pytest
import video_world
import wan
from project import Project

CAPTIONS = {"calm": "a calm sea", "storm": "a storm", "wind": "wind in the trees"}
RUN = "tiny"


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A project with three videos, nothing built. Not to be changed: copy it."""
    models = tmp_path_factory.mktemp("models") / "wan"
    wan.make_model(models)
    values = wan.config()
    values["datasets"] = {
        "films": {
            "path": "data/films",
            "target_frames": 5,
            "frame_extraction": "chunk",
            "sample_stride": 2,
            "fit": "crop",
        }
    }
    values["runs"] = {RUN: {"datasets": ["films"], "model": "wan", "resolutions": [[48, 32]]}}
    project = Project.make(tmp_path_factory.mktemp("clips") / "project", values, models)
    folder = project / "data/films"
    folder.mkdir(parents=True)
    for number, (stem, caption) in enumerate(CAPTIONS.items()):
        path = folder / f"{stem}.mp4"
        video_world.write_video(path, "libx264", 22 + number, size=(96, 80), bf="2", g="5")
        path.with_suffix(".txt").write_text(f"{caption}\n", encoding="utf-8")
    return project


@pytest.fixture(scope="module")
def cut(template: Project, tmp_path_factory: pytest.TempPathFactory) -> Project:
    """The same with its clips cut. Not to be changed: copy it."""
    project = template.copy(tmp_path_factory.mktemp("cut") / "project")
    result = project.run(f"clips_{RUN}", "--cores", "2")
    assert "6 written, 0 kept, 0 removed, 0 sources faulty" in result.output
    assert not project.cache_files()  # nothing was encoded
    return project


def rows(project: Project) -> list[dict[str, Any]]:
    text = (project / f"clips/{RUN}/train.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def files(project: Project) -> dict[str, tuple[bytes, int]]:
    return {
        path.name: (path.read_bytes(), path.stat().st_mtime_ns)
        for path in (project / f"clips/{RUN}").iterdir()
    }


def pictures(path: Path) -> list[np.ndarray]:
    with av.open(str(path)) as file:
        return [np.array(frame.to_image()) for frame in file.decode(video=0)]


def changed(before: dict[str, tuple[bytes, int]], after: dict[str, tuple[bytes, int]]) -> set[str]:
    return {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}


def test_each_clip_is_an_array_of_its_frames_and_a_row_that_says_where_it_is_from(
    cut: Project,
) -> None:
    listed = rows(cut)
    names = [f"{stem}_{start:05d}-005.npz" for stem in CAPTIONS for start in (0, 5)]
    assert [row["video"] for row in listed] == names
    assert set(files(cut)) == {*names, "train.jsonl"}
    for row, name in zip(listed, names, strict=True):
        stem, start = name[:-14], int(name[-13:-8])
        assert row == {
            "video": name,
            "prompt": CAPTIONS[stem],
            "source": f"data/films/{stem}.mp4",
            "source_first_frame": 2 * start,
            "source_stride": 2,
        }
        with np.load(cut / f"clips/{RUN}/{name}", allow_pickle=False) as archive:
            assert archive.files == ["frames"]
            found = archive["frames"]
        assert found.dtype == np.uint8 and found.shape == (5, 32, 48, 3)
        decoded = pictures(cut / row["source"])[2 * start : 2 * start + 10 : 2]
        wanted = [
            cv2.resize(each, (48, 40), interpolation=cv2.INTER_AREA)[4:36] for each in decoded
        ]
        assert np.array_equal(found, np.stack(wanted))


def test_only_what_is_stale_is_cut_again_and_files_of_what_is_gone_go(
    cut: Project, tmp_path: Path
) -> None:
    project = cut.copy(tmp_path / "project")
    project.scramble_mtimes()
    before = files(project)
    result = project.run(f"clips_{RUN}")
    result.one_line("nothing to do: 0 written, 6 kept, 0 removed")
    assert files(project) == before
    (project / "data/films/calm.txt").write_text("a very calm sea\n")
    video_world.write_video(project / "data/films/storm.mp4", "mpeg4", 12, size=(96, 80))
    for ending in ("mp4", "txt"):
        (project / f"data/films/wind.{ending}").unlink()
    (project / f"clips/{RUN}/mine.npz").write_bytes(b"of somebody else")
    before = files(project)
    result = project.run(f"clips_{RUN}")
    result.one_line("1 written, 2 kept, 3 removed")
    after = files(project)
    assert changed(before, after) == {
        "train.jsonl",
        "storm_00000-005.npz",
        "storm_00005-005.npz",  # the new video is shorter
        "wind_00000-005.npz",
        "wind_00005-005.npz",
    }
    assert "mine.npz" in after and "storm_00005-005.npz" not in after
    assert [row["prompt"] for row in rows(project)] == ["a very calm sea"] * 2 + ["a storm"]
    project.run(f"clips_{RUN}").one_line("nothing to do: 0 written, 3 kept, 0 removed")
