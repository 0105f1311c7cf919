"""Guides whose commands need a cluster; see tests/worlds/guide_world.py and cluster.sh."""

from __future__ import annotations

from pathlib import Path

import pytest
from guide_world import HUB, Here, follow, guides_that_need
from test_slurm import ClusterProject, is_up

pytestmark = pytest.mark.skipif(not is_up(), reason="no SLURM is running: cluster.sh up")


@pytest.mark.parametrize("name", guides_that_need("slurm"))
def test_a_guide_does_what_it_says(name: str, tmp_path: Path) -> None:
    project = ClusterProject.make(tmp_path / "project", {})
    assert isinstance(project, ClusterProject)
    project.compute_on_the_cpu()
    follow(name, Here(project, HUB))
