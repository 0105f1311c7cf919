"""Another package brings a trainer: it is installed, named in a run, and works as ours do."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import preloaded
import pytest
from latentmake.config import trainers
from project import Project, Result
from safetensors.torch import load_file

PACKAGE = Path(__file__).resolve().parents[1] / "worlds/average_trainer"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which pip has installed the package of the trainer."""
    folder = tmp_path_factory.mktemp("packages")
    offline = ("--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check")
    command = [sys.executable, "-m", "pip", "install", "-q", "--target", folder, PACKAGE, *offline]
    subprocess.run(command, check=True)
    return folder


class Extended(Project):
    """A project beside that package."""

    packages: Path

    def run(self, *arguments: str, **options: Any) -> Result:
        """Run Snakemake in a process that finds the package."""
        preload = [preloaded.environment()["PYTHONPATH"]] if self.preloads else []
        paths = os.pathsep.join([*preload, str(self.packages)])
        return super().run(*arguments, PYTHONPATH=paths, **options)


@pytest.fixture
def project(
    fresh: Callable[[], Project], installed: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Extended]:
    """A project whose run has that trainer."""
    monkeypatch.syspath_prepend(installed)
    trainers.installed.cache_clear()
    made = Extended(fresh().folder)
    made.packages = installed
    trainer = {"kind": "average", "factor": 2.0}
    made.configure(lambda values: values["runs"]["tiny"].update(trainer=trainer))
    yield made
    trainers.installed.cache_clear()


def test_a_trainer_of_another_package_is_planned_run_explained_and_checked(
    project: Extended,
) -> None:
    project.ask("check", "tiny").one_line("factor", "ok", "the mean is multiplied by 2.0")
    project.preloads = False
    project.run("train_tiny")
    project.preloads = True  # from here on, processes need not find the package by themselves
    weights = project / "runs/tiny/average.safetensors"
    first = load_file(weights)["mean"]
    project.ask("explain", "train_tiny").one_line("train_tiny: fresh (trained; nothing differs)")
    assert project.run("train_tiny").idle

    (project / "data/shapes/ant.txt").write_text("a purple circle")
    project.ask("explain", "train_tiny").one_line("items of shapes: 1 edited")
    assert "train" in project.run("train_tiny").jobs and load_file(weights)["mean"] == first

    project.configure(lambda values: values["runs"]["tiny"]["trainer"].update(factor=4.0))
    project.ask("explain", "train_tiny").one_line("factor 2.0 -> 4.0")
    assert project.run("train_tiny").jobs == ["train", "train_tiny"]
    assert load_file(weights)["mean"] == 2 * first
    weights.unlink()
    project.ask("explain", "train_tiny").one_line("runs/tiny/average.safetensors is missing")
    assert project.run("train_tiny").jobs == ["train", "train_tiny"]
    assert project.run("train_tiny").idle and weights.is_file()


def test_mistakes_in_its_settings_are_named_as_in_ours(project: Extended) -> None:
    def told(**trainer: object) -> str:
        project.configure(lambda values: values["runs"]["tiny"].update(trainer=trainer))
        return project.run("-n", "train_tiny", check=False).one_line("error:")

    assert "runs.tiny.trainer.facto: unknown key; did you mean `factor`?" in told(
        kind="average", facto=1
    )
    assert '"much" should be a valid number' in told(kind="average", factor="much")
    assert 'there is no trainer "averag"' in told(kind="averag")


def test_its_page_of_the_reference_has_its_keys(installed: Path) -> None:
    scripts = Path(__file__).resolve().parents[2] / "scripts"
    place = os.pathsep.join(map(str, (scripts, installed)))
    command = [sys.executable, "-m", "reference", "average"]
    environment = {**os.environ, "PYTHONPATH": place}
    page = subprocess.run(command, check=True, text=True, capture_output=True, env=environment)
    assert page.stdout.startswith("# Trainer average\n\nThe mean of the latents.")
    assert "### `factor`" in page.stdout and "Factor of the mean." in page.stdout
