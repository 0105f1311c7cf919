"""A build keeps the stale files that its jobs replace; a target that only asks touches none."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any

import pytest
import world
from latentmake.caches.encode import carry_out
from latentmake.plan.running import running_builds
from latentmake.session import Session

CAPTION = "cache/shapes/micro/text/ant.text.safetensors"


@pytest.fixture
def stale(micro: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The configuration of a run of stale caches."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(micro, "models/micro")
    world.make_dataset(Path("data/shapes"))
    values = world.config()
    for order in session(values, "caches_tiny").plan.orders:
        carry_out(order, order.receipt, say=lambda _: None, threads=1)
    values["models"]["micro"]["dtype"] = "bfloat16"
    return values


def session(values: dict[str, Any], *targets: str) -> Session:
    return Session(copy.deepcopy(values), targets=targets, main=True, side_by_side=None)


def changed() -> dict[str, int]:
    """When each cache file was changed; a further name of a file is a change of it."""
    return {str(path): path.stat().st_ctime_ns for path in Path("cache").rglob("*.safetensors")}


@pytest.mark.parametrize(
    ("targets", "kinds"),
    [
        (("latents_tiny",), {"latents"}),
        (("text_tiny",), {"text"}),
        (("caches_tiny",), {"latents", "text"}),
        ((), {"latents", "text"}),
        ((CAPTION, "latents_tiny"), {"latents", "text"}),
    ],
)
def test_a_build_keeps_what_it_replaces(
    stale: dict[str, Any], targets: tuple[str, ...], kinds: set[str]
) -> None:
    build = session(stale, *targets)
    build.begin()
    replaced = {path for order in build.plan.orders if order.kind in kinds for path in order.paths}
    assert replaced and all(Path(path).stat().st_nlink > 1 for path in replaced)
    (running,) = running_builds()
    assert {work.split()[0] for work in running.made} == kinds
    build.end(succeeded=False)
