"""Guides whose commands need the trainers' own code; see tests/worlds/guide_world.py.

`git clone` of a trainer lays its real sources, `python3 -m venv` and `uv venv` an environment of
the trainers, whose networks are tiny.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import pytest
from conftest import FOLDERS, SITE, Weights, sources
from guide_world import HUB, TRAINERS_HUB, Here, follow, guides_that_need
from project import Project

pytestmark = pytest.mark.real_trainer


@pytest.mark.parametrize("name", guides_that_need("trainers"))
def test_a_guide_does_what_it_says(
    name: str, tmp_path: Path, forked_venv: Path, tiny_weights: Weights
) -> None:
    project = Project.make(tmp_path / "project", {})
    made = {repo: partial(write, tiny=tiny_weights) for repo, write in TRAINERS_HUB.items()}
    here = Here(project, {**HUB, **made})

    def clone(words: list[str]) -> None:
        url = next(word for word in words if word.startswith("https://github.com/"))
        trainer = url.removesuffix(".git").rpartition("/")[2]
        assert trainer in FOLDERS, f"{url} is no trainer of these tests"
        place = project / (words[-1] if words[-1] != url else trainer)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.mkdir()  # of its own, since a guide may lay an environment into it
        for each in sources(trainer).iterdir():
            (place / each.name).symlink_to(each)

    def lay_venv(words: list[str]) -> None:
        place = project / words[-1]
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(forked_venv)

    here.handlers |= {"git clone": clone, "python3 -m venv": lay_venv, "uv venv": lay_venv}
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(SITE)
    here.paths.append(os.fspath(site))
    follow(name, here)
