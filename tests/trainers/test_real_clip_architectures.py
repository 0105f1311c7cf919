"""musubi-tuner's real caching scripts and dataset classes, on clips and tiny random models.

Each architecture's networks are of its own classes, made small by their constants; no encoder's
call is stood in for.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import sources
from real_clip_models import CLIP_WORLDS
from real_project import RealProject, check

pytestmark = pytest.mark.real_trainer


@pytest.mark.parametrize("name", CLIP_WORLDS)
def test_real_scripts_make_what_is_stale_and_real_datasets_load_it(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    forked_venv: Path,
    tiny_weights: Callable[[str], Path],
) -> None:
    world = CLIP_WORLDS[name]
    tuner = sources("musubi-tuner")
    real = RealProject(world, tmp_path / "work", tiny_weights(world.weights), tuner, forked_venv)
    monkeypatch.chdir(real.project.folder)
    check(real)
