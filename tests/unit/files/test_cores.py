"""Cores are counted in one place, on every system."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from latentmake.files import cores

PACKAGE = Path(cores.__file__).parents[1]


def test_cores_are_those_that_the_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 5, 6}, raising=False)
    assert cores.usable_cores() == 3


def test_a_system_that_tells_no_affinity_has_the_cores_that_it_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    assert cores.usable_cores() == os.cpu_count()


def test_no_other_module_asks_the_system_for_an_affinity() -> None:
    asking = [
        path.name
        for path in PACKAGE.rglob("*.py")
        if "sched_getaffinity" in path.read_text(encoding="utf-8")
    ]
    assert asking == ["cores.py"]
