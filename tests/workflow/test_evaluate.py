"""evaluate_{run}: a trained LoRA against the base on sources that did not train."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import video_world
import wan
import wan_world
from dit_world import tiny_dit
from latentmake.base import digest
from project import Project

FILMS = ("ant", "bee", "cat", "dog")
METRICS, PAGE = "runs/tiny/evaluation/metrics.json", "reports/evaluate_tiny.html"
COMMAND = ("train_tiny", "evaluate_tiny")


@pytest.fixture
def project(tmp_path: Path) -> Project:
    models = tmp_path / "wan"
    wan_world.write_wan_vae(models)
    wan_world.write_umt5(models)
    tiny_dit(num_layers=1).save_pretrained(models / "dit")
    values = wan.config(dit="models/wan/dit")
    values["datasets"]["films"] = {"path": "data/films", "target_frames": [5]}
    values["runs"]["tiny"] |= {
        "datasets": ["films"],
        "resolutions": [[64, 48]],
        "validation": {"items": 2, "clips": 1},
        "generate": {"num_inference_steps": 1, "fps": 8},
        "trainer": {"kind": "wan", "rank": 2, "steps": 2},
    }
    project = Project.make(tmp_path / "project", values, models)
    (project / "data/films").mkdir(parents=True)
    for number, stem in enumerate(FILMS):
        path = project / f"data/films/{stem}.mp4"
        video_world.write_video(path, "libx264", 5 + number)
        path.with_suffix(".txt").write_text(f"colours {stem}", encoding="utf-8")
    return project


def metrics(project: Project) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((project / METRICS).read_bytes())
    return found


def keys(project: Project) -> dict[str, str]:
    """Return the key of each part of the results."""
    found = {}
    for result in metrics(project)["results"]:
        for kind, part in [*result["losses"].items(), *result["clips"].items()]:
            frames = "clip" if "file" in part else "loss"
            found[f"{result['name'].split('/')[1].split()[0]} {kind} {frames}"] = part["key"]
    return found


def clip_times(project: Project) -> dict[str, int]:
    """Return what made each clip -> mtime of its file."""
    files = (project / METRICS).parent.glob("*.mp4")
    return {path.stem.rpartition("_")[2]: path.stat().st_mtime_ns for path in files}


def test_a_lora_is_judged_by_what_did_not_train(project: Project) -> None:
    project.run(*COMMAND)
    lines = (project / "runs/tiny/manifest.jsonl").read_text().splitlines()
    held = {row["stem"]: row for row in map(json.loads, lines) if "validation" in row}
    assert len(held) == 2
    lock = json.loads((project / "runs/tiny/dataset.lock").read_bytes())
    films = {stem: digest.of_file(project / f"data/films/{stem}.mp4") for stem in held}
    assert lock["held_out"] == sorted(films.values())
    found = metrics(project)
    assert [each["name"] for each in found["results"]] == [f"films/{s} 64x48" for s in sorted(held)]
    assert len(found["timesteps"]) == 10 and found["timesteps"] == sorted(found["timesteps"])
    assert found["loss"]["base"] != found["loss"]["adapter"]
    assert [set(each["clips"]) for each in found["results"]] == [{"real", "base", "adapter"}, set()]
    trained = (project / "runs/tiny/training.json").read_bytes()
    assert (project / PAGE).is_file()
    assert project.run(*COMMAND).idle

    first, second = sorted(held)
    (project / f"data/films/{first}.txt").write_text("other colours", encoding="utf-8")
    before, times = keys(project), clip_times(project)
    (project / PAGE).unlink()
    project.ask("explain", PAGE).one_line("items of films: 1 edited")
    project.run(*COMMAND)
    after = keys(project)
    changed = {name for name, key in after.items() if key != before[name]}
    assert changed == {
        f"{first} {kind} {part}" for kind in ("base", "adapter") for part in ("loss", "clip")
    }
    assert {name for name, mtime in clip_times(project).items() if mtime == times[name]} == {"real"}
    assert (project / "runs/tiny/training.json").read_bytes() == trained
    assert (project / PAGE).is_file()

    (project / f"data/films/{second}.mp4").rename(project / "data/films/zebra.mp4")
    (project / f"data/films/{second}.txt").rename(project / "data/films/zebra.txt")
    project.configure(lambda values: values["runs"]["tiny"]["trainer"].update(steps=3))
    before = {name.replace(second, "zebra"): key for name, key in keys(project).items()}
    assert {"train", "evaluate"} <= {*project.run("evaluate_tiny").jobs}
    changed = {name.partition(" ")[2] for name, key in keys(project).items() if key != before[name]}
    assert changed == {"adapter loss", "adapter clip"}
    assert project.run(*COMMAND).idle
    project.ask("explain", PAGE).one_line(f"{PAGE}: fresh")
    project.configure(
        lambda values: values["runs"]["tiny"].update(generate={"num_inference_steps": 3})
    )
    project.ask("explain", "evaluate_tiny").one_line("differs     steps of a clip")


def test_what_cannot_be_evaluated_is_told_in_one_line(project: Project) -> None:
    project.configure(lambda values: values["runs"]["tiny"].pop("validation"))
    line = project.refusal("evaluate_tiny")
    assert "all items of the run tiny train" in line and "runs.tiny.validation" in line
    project.configure(lambda values: values["runs"]["tiny"].update(validation={"items": 3}))
    line = project.refusal("evaluate_tiny")
    assert "3 of 4 different sources" in line and "2 or less" in line
