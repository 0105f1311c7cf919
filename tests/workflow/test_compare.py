"""`latentmake compare` on a project: a page of runs that have pictures, and nothing else made."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import world
from compare_world import make_run
from project import Project


def test_runs_with_pictures_are_compared_and_others_are_named(
    template: Project, tmp_path: Path
) -> None:
    project = template.copy(tmp_path / "project")
    run = {**project.config["runs"]["tiny"], "trainer": world.training()}
    project.configure(lambda values: values.update(runs={"one": run, "two": run}))
    with contextlib.chdir(project.folder):
        make_run("one", ["a cat"], [0, 2])
    said = project.ask("compare", "one", "two", check=False)
    assert said.returncode == 2 and said.output.count("\n") == 1
    assert "run two: has no sample pictures yet; make them: latentmake build" in said.output
    assert "did you mean `two`?" in project.ask("compare", "one", "tow", check=False).output
    with contextlib.chdir(project.folder):
        make_run("two", ["a cat"], [0, 4])
    before = project.snapshot()
    said = project.ask("compare", "one", "two")
    assert "reports/compare_one_vs_two.html: " in said.output
    page = project / "reports/compare_one_vs_two.html"
    assert page.is_file() and project.snapshot() == before
    content = page.read_bytes()
    project.ask("compare", "one", "two")
    assert page.read_bytes() == content
    said = project.ask("compare", "one", "two", "--json").output
    found = json.loads(said[said.index("{") :])  # lines for people go to standard error
    assert found["page"] == str(page.relative_to(project.folder))
    assert [each["name"] for each in found["results"]] == ["one", "two"]
    steps = [[(x["prompt"], x["step"]) for x in each["pictures"]] for each in found["results"]]
    assert steps == [[("a cat", "0"), ("a cat", "2")], [("a cat", "0"), ("a cat", "4")]]
