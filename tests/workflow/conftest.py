"""Every test works on a project of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import wan
import world
from browser import Browser, started
from made_once import made_once
from project import Project


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with started() as running:
        yield running


@pytest.fixture
def built(template: Project, tmp_path: Path) -> Project:
    """A project of the test's own, with all caches built."""
    return template.copy(tmp_path / "project")


@pytest.fixture(scope="session")
def trained_template(tmp_path_factory: pytest.TempPathFactory, template: Project) -> Project:
    """The finished build with a training. Not to be changed: copy it."""

    def make(folder: Path) -> None:
        project = template.copy(folder)
        project.configure(lambda config: config["runs"]["tiny"].update(trainer=world.training()))
        project.run("train_tiny")

    return Project(made_once(tmp_path_factory, "trained", make))


@pytest.fixture
def trained(trained_template: Project, tmp_path: Path) -> Project:
    return trained_template.copy(tmp_path / "project")


@pytest.fixture(scope="session")
def wan_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the tiny Wan model."""
    return made_once(tmp_path_factory, "wan", wan.make_model)


@pytest.fixture
def fresh(micro: Path, tmp_path: Path) -> Callable[[], Project]:
    """Make a project of the test's own, with model and data, and nothing built."""

    def make() -> Project:
        project = Project.make(tmp_path / "project", world.config(), micro)
        world.make_dataset(project / "data/shapes")
        return project

    return make
