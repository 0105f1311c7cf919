"""The command `latentmake` on a built project: what it prints, its exit status, what it writes."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from project import ROOT, Project

ASKING = [
    ("status",),
    ("status", "tiny", "--json"),
    ("explain", "data/shapes/ant.png"),
    ("check",),
    ("cost", "tiny", "--set", "models.micro.dtype=float16"),
    ("verify",),
    ("doctor",),
    ("prune",),
    ("captions", "tiny"),
    ("report", "tiny"),
    ("report", "tiny", "--json"),
    ("prune", "--json"),
    ("uses", "data/shapes/ant.png"),
    ("doctor", "--json"),
]


def files(project: Project) -> dict[str, tuple[int, int]]:
    """Every file of a project but the memo and pages, with what tells that it was written."""
    found = (path for path in project.folder.rglob("*") if path.is_file())
    found = (path for path in found if path.parent.name != "reports")
    found = (path for path in found if not path.name.startswith("memo.sqlite"))
    return {str(path): (path.stat().st_ctime_ns, path.stat().st_size) for path in found}


@pytest.mark.parametrize("arguments", ASKING, ids=" ".join)
def test_a_word_that_asks_writes_nothing_but_the_memo_and_its_page(
    built: Project, arguments: tuple[str, ...]
) -> None:
    (built / "data/shapes/ant.txt").write_text("another caption\n")
    before = files(built)
    built.ask(*arguments, check=False)
    assert files(built) == before


def test_json_is_all_that_a_word_prints_then(built: Project) -> None:
    built.configure(lambda values: values["runs"]["tiny"].update(resolutions=[16]))

    def asked(*arguments: str) -> Any:
        with contextlib.redirect_stderr(io.StringIO()):
            return json.loads(built.ask(*arguments, "--json").output)

    status, report = asked("status")[0], asked("report", "tiny")
    assert report.pop("page") == "reports/report_tiny.html" and report.keys() == status.keys()
    assert asked("doctor")["versions"]["python"]
    listed = asked("prune")
    gone = {"dataset": "shapes", "reason": "no run needs 32 of it"}
    assert listed["files"] and not listed["removed"]
    for each in listed["files"]:
        assert (
            each.items() > gone.items() and each["bytes"] == (built / each["path"]).stat().st_size
        )
    removed = asked("prune", "--yes")
    assert removed["removed"] and removed["files"] == listed["files"]
    assert not any((built / each["path"]).exists() for each in removed["files"])
    assert asked("prune")["files"] == []


def test_options_stand_before_or_behind_the_word_and_files_are_merged(
    template: Project, tmp_path: Path
) -> None:
    other = tmp_path / "more.yaml"
    other.write_text("runs: {tiny: {resolutions: [16]}}\n")
    usual = str(template / "config/config.yaml")
    front = template.ask("-c", usual, "-c", str(other), "status", "tiny").output
    behind = template.ask("status", "tiny", "-c", usual, "--configfile", str(other)).output
    assert front == behind and "latents 16" in front and "latents 32" not in front
    assert "latents 32" in template.ask("status", "--directory", str(template.folder)).output


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["status", "tinny"], "error: tinny: there is no such run; did you mean `tiny`?"),
        (["status", "-c", "gone.yaml"], "gone.yaml: there is no such file"),
        (["status", "--directory", "gone"], "error: gone: there is no such folder"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(
    template: Project, arguments: list[str], line: str
) -> None:
    said = template.ask(*arguments, check=False)
    assert said.returncode == 2 and line in said.output and said.output.count("\n") == 1


@pytest.mark.parametrize("word", ["status", "explain", "import"])
def test_a_former_target_is_answered_with_the_command_to_type(template: Project, word: str) -> None:
    target = f"{word}_tiny" if word == "status" else word
    said = template.run("-n", target, check=False)
    assert said.returncode == 1
    said.one_line(f"{target}: is no longer a target of Snakemake", f"type `latentmake {word}`")


def test_it_is_a_module_too_and_tells_its_version(template: Project) -> None:
    command = [sys.executable, "-m", "latentmake", "--version"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "scripts")}
    done = subprocess.run(
        command, env=environment, cwd=template.folder, capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("latentmake 0.")
