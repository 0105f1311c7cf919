"""Help and completion of the command load nothing heavy, and tell what the words take."""

from __future__ import annotations

import inspect
import os
import pty
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import typer
from latentmake.cli import app
from latentmake.commands import completion
from latentmake.commands.project import coloured
from latentmake.runs.findings import Finding, checklist

ROOT = Path(__file__).resolve().parents[3]
COMMANDS = {each.name or "": each.callback for each in app.registered_commands}


def test_a_word_takes_what_the_function_of_its_work_takes() -> None:
    for name, word in COMMANDS.items():
        assert word is not None
        outside = inspect.getclosurevars(word).nonlocals
        module = import_module(f"latentmake.{outside['module']}")
        work = [*inspect.signature(getattr(module, word.__name__)).parameters]
        taken = [*inspect.signature(word).parameters]
        if outside["project"]:
            assert taken[-3:] == ["as_json", "configfile", "directory"], name
            taken = ["facts", *taken[:-2]]
        assert work == taken, name


def test_help_and_completion_of_each_word_load_no_configuration() -> None:
    code = f"""import os, sys
from latentmake.cli import app
from typer.testing import CliRunner
for word in {[[], *([name] for name in COMMANDS)]}:
    assert "Usage: latentmake" in CliRunner().invoke(app, [*word, "--help"]).output
environment = {{"_LATENTMAKE_COMPLETE": "complete_bash", "COMP_CWORD": "2"}}
environment["COMP_WORDS"] = "latentmake status mi"
said = CliRunner().invoke(app, [], env=environment, prog_name="latentmake").output
assert said.strip() == "michael_gove", said
heavy = ("latentmake.config", "latentmake.plan", "snakemake", "torch", "numpy", "PIL")
sys.exit(", ".join(each for each in heavy if each in sys.modules) or 0)"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "scripts")}
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def context(**values: object) -> typer.Context:
    found = typer.Context(typer.main.get_command(app))
    found.params = values
    return found


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config").mkdir()
    (tmp_path / "config/config.yaml").write_text("datasets: {d: {}}\nruns: {one: {}, other: {}}\n")
    (tmp_path / "cats.yaml").write_text("runs:\n  cats: {}\n")
    (tmp_path / "broken.yaml").write_text("runs: {a: [\n")
    (tmp_path / "else.yaml").write_text("runs: 3\n")
    return tmp_path


def test_runs_and_datasets_complete_from_the_configurations_of_the_folder(folder: Path) -> None:
    assert completion.runs(context(), "") == ["one", "other", "cats"]
    assert completion.runs(context(), "o") == ["one", "other"]
    assert completion.datasets(context(configfile=None), "") == ["d"]
    assert completion.runs(context(directory=folder / "gone"), "") == []


def test_files_of_the_option_come_instead_and_one_that_cannot_be_read_has_none(
    folder: Path,
) -> None:
    os.mkfifo(folder / "pipe.yaml")
    (folder / "latin.yaml").write_bytes(b"runs: {\xe4: {}}")
    assert completion.runs(context(configfile=[Path("cats.yaml")]), "") == ["cats"]
    for name in ("gone", "broken", "else", "pipe", "latin"):
        assert completion.runs(context(configfile=[Path(f"{name}.yaml")]), "") == []


def test_targets_of_a_build_complete(folder: Path) -> None:
    found = completion.targets(context(configfile=["cats.yaml"]), "t")
    assert found == ["train_cats", "text_cats"]
    assert {"all", "export_cats", "clips_cats"} < {*completion.targets(context(), "")}


@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("latentmake report -c cats.yaml c", ["cats"]),
        ("latentmake compare one o", ["one", "other"]),
        ("latentmake status -c ", []),  # the shell completes files itself
    ],
)
def test_the_shell_gets_names_or_completes_files_itself(
    folder: Path, typed: str, completed: list[str]
) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "scripts"), "COMP_WORDS": typed}
    environment |= {"_LATENTMAKE_COMPLETE": "complete_bash", "COMP_CWORD": str(typed.count(" "))}
    code = "import sys; sys.argv[0] = 'latentmake'; from latentmake.cli import main; main()"
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, env=environment, cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.stdout.split() == completed, done.stderr


def test_verdicts_have_a_colour_which_no_color_takes_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    found = [Finding("disk", "ok", "3 GB"), Finding("items", "failed", "one")]
    shown = checklist(found, coloured)
    assert typer.style("ok", fg="green") in shown and typer.style("failed", fg="red") in shown
    aligned = "\n".join(re.sub("\x1b.*?m", "", line) for line in shown.splitlines())
    assert aligned == checklist(found)
    monkeypatch.setenv("NO_COLOR", "1")
    assert checklist(found, coloured) == checklist(found)


@pytest.mark.parametrize("plain", ["", "1"])
def test_the_word_error_is_red_in_a_terminal_only(tmp_path: Path, plain: str) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "latentmake", "status", "--directory", "nowhere"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "scripts"), "NO_COLOR": plain}
    subprocess.run(command, cwd=tmp_path, env=environment, stderr=theirs, check=False)
    line = os.read(ours, 1000).decode().strip()
    os.close(ours)
    os.close(theirs)
    word = "error" if plain else typer.style("error", fg="red")
    expected = ": nowhere: there is no such folder; check --directory"
    assert line == f"{word}{expected}"
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, check=False)
    assert done.stderr.decode() == f"error{expected}\n"
