"""What has no room on its disk is refused before it is written, and cores are counted once."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from latentmake.files import workspace
from latentmake.files.workspace import Need, free, human, shortages, usable_cores


def test_what_has_no_room_is_one_line_a_disk(tmp_path: Path) -> None:
    there = free(tmp_path / "not" / "made" / "yet")
    half = Need("latents of wan", str(tmp_path / "cache"), there * 6 // 10)
    assert not list(shortages([half, Need("nothing", "cache", 0)]))
    both = [half, half._replace(what="clips", folder=str(tmp_path / "clips"))]
    (error,) = shortages(both)
    line = str(error)
    assert line.startswith(f"{tmp_path}/cache: {human(half.size)} of latents of wan, ")
    assert "of clips must be written, but only" in line and "; free some space" in line
    assert not (tmp_path / "not").exists()


def test_bytes_for_people() -> None:
    sizes = (999, 250_000, 4_190_000, 503_000_000, 4.137e11, 1.2e12)
    named = ["1.0 kB", "0.2 MB", "4.2 MB", "0.5 GB", "413.7 GB", "1.2 TB"]
    assert [*map(human, sizes)] == named


def test_cores_are_those_that_the_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 5, 6}, raising=False)
    assert usable_cores() == 3
    monkeypatch.delattr(os, "sched_getaffinity")  # macOS tells no affinity
    assert usable_cores() == os.cpu_count()
    asking = Path(workspace.__file__).parents[1].rglob("*.py")
    assert [x.name for x in asking if "sched_getaffinity" in x.read_text()] == ["disk.py"]
