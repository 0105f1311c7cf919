"""A state file is read as it was written."""

from __future__ import annotations

from pathlib import Path

from latentmake.base.state_file import JsonFile
from pydantic import Field


class Counts(JsonFile):
    run: str
    forced: bool = False
    counts: dict[str, int] = Field({})


def test_values_that_were_filled_after_it_was_made_are_written(tmp_path: Path) -> None:
    counts, file = Counts(run="cats"), tmp_path / "counts.json"
    counts.counts["clips"] = 3
    counts.write(file)
    assert Counts.read(file) == counts
    assert "forced" not in file.read_text()
