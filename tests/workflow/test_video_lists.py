"""A list of videos, captions for parts of them, and npz clips: what each edit makes again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch
import video_world
import wan
from project import NOTHING, Project
from safetensors.torch import load_file

LIST = "data/films/train.jsonl"
ROWS: list[dict[str, Any]] = [
    {"video": "day/walk.mp4", "prompt": "a walk", "score": 5},
    {"video": "day/walk.mp4", "prompt": "the walk ends", "first_frame": 9, "frames": 5},
    {"video": "run.mp4", "prompt": "a run", "start": 0.25, "end": 0.8},
    {"file_name": "clip.npz", "text": "a clip"},
]


def write(project: Project, rows: list[dict[str, Any]]) -> None:
    lines = "".join(f"{json.dumps(row)}\n" for row in rows)
    (project / LIST).write_text(lines, encoding="utf-8")


def frames_of(path: Path) -> list[np.ndarray]:
    with av.open(str(path)) as file:
        return [frame.to_ndarray(format="rgb24") for frame in file.decode(video=0)]


def latents(stem: str, clip: str = "00000-005") -> str:
    return f"cache/shapes/wan/64/{stem}_{clip}_0064x0064_wan.safetensors"


def text(stem: str) -> str:
    return f"cache/shapes/wan/64/{stem}_wan_te.safetensors"


ALL = {
    *map(latents, ("day_walk", "day_walk.f9-5", "run.s0.25-0.8", "clip")),
    *map(text, ("day_walk", "day_walk.f9-5", "run.s0.25-0.8", "clip")),
}


@pytest.fixture(scope="session")
def films(tmp_path_factory: pytest.TempPathFactory, wan_model: Path) -> Project:
    """A project whose caches are built from a list. Not to be changed: copy it."""
    values = wan.config(dtype="float32")
    values["datasets"]["shapes"] = {"path": LIST, "target_frames": 5, "fit": "crop"}
    values["runs"]["tiny"]["resolutions"] = [64]
    project = Project.make(tmp_path_factory.mktemp("films") / "project", values, wan_model)
    folder = project / "data/films"
    (folder / "day").mkdir(parents=True)
    for name, seed in (("day/walk.mp4", 20), ("run.mp4", 30)):
        video_world.write_video(folder / name, "libx264", seed, size=(96, 64), bf="2", g="8")
    np.savez(folder / "clip.npz", frames=np.stack(frames_of(folder / "day/walk.mp4")[9:14]))
    write(project, ROWS)
    project.run("caches_tiny")
    return project


@pytest.fixture
def built(films: Project, tmp_path: Path) -> Project:
    return films.copy(tmp_path / "project")


def test_each_row_is_an_item_and_the_same_command_does_nothing(built: Project) -> None:
    assert set(built.cache_files()) == ALL
    rows = [json.loads(line) for line in (built / "runs/tiny/manifest.jsonl").open()]
    told = {row["stem"]: (row.get("span"), row.get("row")) for row in rows}
    assert told == {
        "day_walk": (None, {"score": 5}),
        "day_walk.f9-5": ([9, 5, 1, True], None),
        "run.s0.25-0.8": ([6, 14, 1, False], None),
        "clip": (None, None),
    }
    before = built.snapshot()
    assert built.run("caches_tiny").idle
    assert built.changed(before) == NOTHING


def test_an_npz_clip_gives_the_latents_of_the_frames_it_was_cut_from(films: Project) -> None:
    one = load_file(films / latents("clip"))
    other = load_file(films / latents("day_walk.f9-5"))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[key], other[key]) for key in one)
    whole = load_file(films / latents("day_walk"))
    assert not any(torch.equal(whole[key], other[key]) for key in other)


def test_edits_of_a_list_make_just_what_they_concern(built: Project) -> None:
    rows = [dict(row) for row in ROWS]
    # The caption of one part.
    before = built.snapshot()
    rows[1]["prompt"] = "the walk ends at a door"
    write(built, rows)
    result = built.run("caches_tiny")
    assert result.encoded("text")[:2] == (1, 0) and result.encoded("latents").encoded == 0
    assert built.changed(before)._replace(rewritten=set()) == NOTHING._replace(
        content={text("day_walk.f9-5")}
    )
    # One video replaced: the clips of both its rows.
    before = built.snapshot()
    video_world.write_video(built / "data/films/day/walk.mp4", "mpeg4", 24, size=(96, 64))
    result = built.run("caches_tiny")
    assert result.encoded("latents")[:2] == (2, 0) and result.encoded("text").encoded == 0
    assert built.changed(before).content == {latents("day_walk"), latents("day_walk.f9-5")}
    # A row removed, and another one added, which overlaps with a clip that is there.
    before = built.snapshot()
    rows[2:3] = [{"video": "run.mp4", "prompt": "a run", "first_frame": 6}]
    write(built, rows)
    result = built.run("caches_tiny")
    assert result.encoded()[:2] == (0, 0)  # the same frames and the same caption, linked
    changed = built.changed(before)
    assert changed.removed == {latents("run.s0.25-0.8"), text("run.s0.25-0.8")}
    assert changed.added == {latents("run.f6"), text("run.f6")}
    assert not changed.content
    assert built.run("caches_tiny").idle


def write_bad(folder: Path) -> dict[str, str]:
    """Write files that no clip can be made of; return what is said of each."""
    whole = (folder / "run.mp4").read_bytes()
    (folder / "cut.mp4").write_bytes(whole[: len(whole) // 2])
    np.savez(folder / "flat.npz", frames=np.zeros((5, 8, 8), np.uint8))
    return {
        "cut.mp4": "cut short",
        "flat.npz": "holds uint8 [5, 8, 8], no clip",
        "none.mp4": "does not exist",
    }


def test_bad_rows_are_named_and_stop_no_other(built: Project) -> None:
    before = built.snapshot()
    bad = write_bad(built / "data/films")
    rows: list[dict[str, Any]] = [{**row, "score": 6} for row in ROWS[:1]] + ROWS[1:]
    rows += [{"video": name, "prompt": "x"} for name in bad]
    rows.append({"video": "run.mp4", "prompt": "x", "first_frame": 28, "frames": 5})
    write(built, rows)
    result = built.run("caches_tiny", check=False)
    assert result.returncode
    for number, (name, what) in enumerate(bad.items(), len(ROWS) + 1):
        assert what in result.one_line(f"{LIST}, line {number}: ", name)
    beyond = result.one_line(f"{LIST}, line {len(rows)}: ")
    assert "names 5 frames from frame 28 on, but the video has 30" in beyond
    assert result.encoded().encoded == 0 and built.changed(before) == NOTHING
    # Skipped; one of odd sides is an item, one of three frames is left out with a line.
    odd = built / "data/films/odd.mkv"
    video_world.write_video(odd, "ffv1", 9, size=(63, 47), format="yuv444p")
    video_world.write_video(odd.with_name("short.mp4"), "mpeg4", 3)
    rows += [{"video": name, "prompt": "odd"} for name in ("odd.mkv", "short.mp4")]
    write(built, rows)
    built.configure(lambda values: values["datasets"]["shapes"].update(on_error="skip"))
    result = built.run("caches_tiny")
    assert "short.mp4 has too few frames for any clip" in result.one_line("is left out")
    assert result.encoded("latents").encoded == 1
    assert built.changed(before).added == {latents("odd"), text("odd")}
    lines = [json.loads(line) for line in (built / "runs/tiny/manifest.jsonl").open()]
    assert sum("aside" in row for row in lines) == len(bad) + 1
    assert [row["row"] for row in lines if "row" in row] == [{"score": 6}]
    assert built.run("caches_tiny").idle


def test_a_cache_file_of_a_row_can_be_asked_for_by_name(built: Project) -> None:
    asked = [latents("day_walk.f9-5"), text("run.s0.25-0.8")]
    before = built.snapshot()
    for path in asked:
        (built / path).unlink()
    built.run(*asked)
    assert built.changed(before)._replace(rewritten=set()) == NOTHING
    assert "no item has a cache file" in built.run(latents("day_walk.f8-5"), check=False).output
