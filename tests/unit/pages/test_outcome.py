"""The last lines of a build say how much of it is finished."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from latentmake.pages import outcome
from latentmake.plan.orders import Target

pytestmark = pytest.mark.usefixtures("own_folder")


def test_a_folder_in_the_place_of_a_cache_file_is_not_finished() -> None:
    targets = [Target(part="16", path=name) for name in ("made", "folder", "missing")]
    Path("made").touch()
    Path("folder").mkdir()
    order: Any = SimpleNamespace(targets=targets)
    (line,) = outcome.interrupted([order])
    assert line == "interrupted; finished: 1 of 3 cache files; the same command goes on"
