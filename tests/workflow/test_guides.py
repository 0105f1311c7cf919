"""The guides of the documentation, followed from their text: each command prints what they show.

`tests/worlds/guide_world.py` has their table. Guides that need real trainers or a cluster are
followed by `tests/trainers/test_guides_real.py` and `tests/slurm/test_guides_slurm.py`.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from guide_page import Block, commands_of, difference
from guide_world import GUIDES, HUB, Here, follow, guides_that_need
from made_once import made_once
from project import ROOT, Project


@pytest.mark.parametrize("name", guides_that_need(""))
def test_a_guide_does_what_it_says(
    name: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    project = Project.make(tmp_path / "project", {})
    follow(name, Here(project, HUB, made=partial(made_once, tmp_path_factory)))


def test_each_guide_is_in_the_table() -> None:
    pages = {f"guides/{page.name}" for page in (ROOT / "docs/guides").glob("*.md")}
    assert pages <= GUIDES.keys()


def test_an_output_is_compared_line_by_line() -> None:
    printed = "plan\n \x1b[1mtext   1  .\x1b[0m\nmade in 3 s\nend\n"
    assert difference(["plan", "text 1 .", "...", "made in ... s"], printed) is None
    assert "was not printed" in (difference(["text 2 ."], printed) or "")
    assert "printed before" in (difference(["end", "plan"], printed) or "")


def test_a_session_is_split_into_commands() -> None:
    block = Block("console", None, 7, "$ a \\\n> b\nout\n\n$ c  # exit 2\nerror: d\n")
    first, second = commands_of(block)
    assert (first.line, first.text, first.status) == (8, "a \\\nb", 0)
    assert first.output == ["out", ""]
    assert (second.line, second.text, second.status) == (12, "c", 2)
    assert second.output == ["error: d"]
