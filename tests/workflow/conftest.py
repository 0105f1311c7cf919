"""A micro model and a finished build, made once; every test works on a copy of its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import world
from project import Project


@pytest.fixture(scope="session")
def micro(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the micro model."""
    folder = tmp_path_factory.mktemp("models") / "micro"
    world.make_model(folder)
    return folder


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory, micro: Path) -> Project:
    """A project whose caches are all built. Not to be changed: copy it."""
    folder = tmp_path_factory.mktemp("template") / "project"
    project = Project.make(folder, world.config(), micro)
    world.make_dataset(project / "data/shapes")
    project.run("caches_tiny")
    return project


@pytest.fixture
def built(template: Project, tmp_path: Path) -> Project:
    """A project of the test's own, with all caches built."""
    return template.copy(tmp_path / "project")


@pytest.fixture
def fresh(micro: Path, tmp_path: Path) -> Callable[[], Project]:
    """Make a project of the test's own, with model and data, and nothing built."""

    def make() -> Project:
        project = Project.make(tmp_path / "project", world.config(), micro)
        world.make_dataset(project / "data/shapes")
        return project

    return make
