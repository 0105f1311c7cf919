"""Every test works on a project of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import world
from browser import Browser, started
from project import Project


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with started() as running:
        yield running


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
