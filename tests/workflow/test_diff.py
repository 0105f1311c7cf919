"""`latentmake diff` and `latentmake runs` on a project with trainings in its history."""

from __future__ import annotations

import csv
import json
import re
import shutil
from typing import Any

import pytest
import typer
import world
from project import Project

FILE = "kohya.safetensors"


def said(project: Project, *words: str) -> Any:
    return json.loads(project.ask(*words, "--json").output)


def refused(project: Project, *words: str) -> str:
    result = project.ask(*words, check=False)
    assert result.returncode == 2 and result.output.count("\n") == 1
    return result.output.removeprefix("error: ").strip()


@pytest.fixture
def twice(trained: Project) -> Project:
    """A project that was trained, edited and trained again."""
    (trained / "data/shapes/cat.txt").write_text("a green disc on a wall")
    world.draw(trained / "data/shapes/dog.png", 77)
    world.draw(trained / "data/shapes/new.png", 5)
    (trained / "data/shapes/new.txt").write_text("a new one")
    for ending in ("png", "txt"):
        (trained / f"data/shapes/ant.{ending}").rename(trained / f"data/shapes/emmet.{ending}")
        (trained / f"data/shapes/bee.{ending}").unlink()
    return trained


def test_two_trainings_and_todays_data_are_compared(twice: Project, opened: list[str]) -> None:
    before = twice.ask("diff", "tiny").output
    items = "1 added, 1 removed, 1 replaced, 1 renamed, 1 with another caption"
    lines = f"""items     {items}
added     shapes/new
removed   shapes/bee
replaced  shapes/dog
renamed   shapes/ant -> shapes/emmet
"""
    assert re.match(r"tiny \(20\d\d-\d\d-\d\d \d\d:\d\d\) -> today\n", before) and lines in before
    caption = "caption   shapes/cat: a green [-circle-]{+disc+} on [-grey-]{+a wall+}\n"
    assert caption in before
    shutil.copy(twice / "runs/tiny" / FILE, twice / "kept.safetensors")
    twice.configure(lambda config: config["runs"]["tiny"]["trainer"].update(rank=4))
    assert "\nsetting   rank 2 -> 4\n" in twice.ask("diff", "tiny").output
    twice.run("train_tiny")
    after = twice.ask("diff", "tiny@1", "tiny").output
    assert lines in after and caption in after
    assert "\nsetting   rank 2 -> 4\n" in after
    assert re.search(r"^result    loss at the end [\d.]+ -> [\d.]+$", after, re.MULTILINE)
    assert "\nresult    steps 2\n" in after
    assert twice.ask("diff", "tiny").output.endswith("items     the same pictures and captions\n")
    since = twice.ask("diff", "tiny@1").output
    assert lines in since and since.endswith("\nsetting   rank 2 -> 4\n")

    values = said(twice, "diff", "tiny@1", "tiny")
    assert said(twice, "diff", "kept.safetensors", "tiny")["items"] == values["items"]
    renamed = {"kind": "renamed", "item": "shapes/emmet", "old": "shapes/ant", "new": ""}
    assert renamed in values["items"]
    assert f"runs/tiny/{FILE}" in values["new"]["weights"]
    assert values["settings"] == [{"name": "rank", "old": "2", "new": "4"}]
    assert refused(twice, "diff", "tiny@9") == (
        "tiny@9: the history of tiny has 2 finished trainings; the oldest is tiny@1"
    )
    twice.ask("diff", "tiny@1", "tiny", "--open")
    page = (twice / "reports/diff_tiny@1_to_tiny.html").read_text()
    assert opened == [(twice / "reports/diff_tiny@1_to_tiny.html").absolute().as_uri()]
    assert '["+","a wall"]' in page and page.count("data:image/webp;base64") == 2

    newest, oldest = said(twice, "runs")
    assert (oldest["items"], newest["items"]) == (6, 6)
    assert [newest[key] for key in ("added", "removed", "edited")] == [1, 1, 2]
    assert newest["weights"][0] == f"runs/tiny/{FILE}" and newest["ended"] == ""
    assert oldest["weights"][0].startswith("runs/tiny/previous/")
    rows = list(csv.DictReader(twice.ask("runs", "tiny", "--csv").output.splitlines()))
    assert [row["folder"] for row in rows] == [newest["folder"], oldest["folder"]]
    assert float(rows[0]["loss_end"]) == newest["loss_end"] and rows[0]["steps"] == "2"
    table = twice.ask("runs", "--sort", "added").output.splitlines()
    assert table[0].split()[:3] == ["when", "run", "items"] and "finished" in table[2]
    twice.ask("runs", "--open")
    page = (twice / "reports/trainings.html").read_text()
    assert "2 trainings." in page and page.count("data:image/webp;base64") == 2


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Addresses that a command opens in a browser, which it does not do here."""
    addresses: list[str] = []
    monkeypatch.setattr(typer, "launch", addresses.append)
    return addresses


def test_a_training_that_was_killed_is_listed_and_is_none_to_compare(trained: Project) -> None:
    (folder,) = (trained / "runs/tiny/history").iterdir()
    killed = folder.with_name("0" * 16)
    shutil.copytree(folder, killed)
    record = json.loads((killed / "training.json").read_text())
    ended = {"ended": "loss is NaN at step 3", "began": record["began"] + 60}
    values = {**record["values"], "settings": {"trigger": "ohwx"}}
    parts = {**record["parts"], "settings": "other"}
    changed = record | ended | {"values": values, "parts": parts}
    (killed / "training.json").write_text(json.dumps(changed))
    first, second = said(trained, "runs")
    assert (first["ended"], first["trigger"], first["weights"]) == (ended["ended"], "ohwx", [])
    assert [first[name] for name in ("added", "removed", "edited")] == [0, 0, 0]
    assert (second["ended"], second["added"]) == ("", None)
    assert "loss is NaN at step 3" in trained.ask("runs").output
    assert refused(trained, "diff", "tiny@1").endswith(
        "has 1 finished training; the oldest is tiny"
    )


def test_a_wrong_name_is_one_line(template: Project) -> None:
    assert refused(template, "diff", "tiny") == (
        "tiny: has no finished training yet; train it: latentmake build tiny"
    )
    assert refused(template, "diff", "tyni") == "tyni: there is no such run; did you mean `tiny`?"
    place = "loras/a.safetensors"
    assert refused(template, "diff", place) == f"{place}: there is no such file; check the path"
    (weights,) = sorted((template / "models/micro/unet").glob("*.safetensors"))
    place = str(weights.relative_to(template.folder))
    hint = "name a run, or the folder of its project with --directory"
    assert refused(template, "diff", place) == (
        f"{place}: no training in runs/*/history wrote this file; {hint}"
    )
    assert refused(template, "runs", "--sort", "los_end") == (
        "--sort los_end: there is no such column; did you mean `loss_end`?"
    )
    assert template.ask("runs").output == "no run has been trained yet\n"


def test_an_unreadable_caption_is_noted_and_stops_no_comparison(trained: Project) -> None:
    (trained / "data/shapes/cat.txt").write_bytes(b"\xff\xff")
    output = trained.ask("diff", "tiny").output
    assert output.startswith("note: data/shapes/cat.txt: is not UTF-8 (byte 1); save it as UTF-8\n")
    assert "items     the same pictures and captions\n" in output
