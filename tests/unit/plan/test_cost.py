"""The cost of a plan grows linearly with the targets to make."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from types import FrameType

import pytest
from latentmake.config.root import parse
from latentmake.data.memo import Memo
from latentmake.plan.facts import Facts
from latentmake.plan.planner import make_plan

STEP = 40


def calls_of_a_plan() -> int:
    """Return how many functions run, built-in ones too, while everything is planned."""
    model = {"vae": "vae", "text": "text"}
    run = {"datasets": "cats", "model": "tiny", "resolutions": [64, 96]}
    values = {"datasets": {"cats": {"path": "data"}}, "models": {"tiny": model}}
    config = parse({**values, "runs": {"first": run}})
    count = 0

    def see(_frame: FrameType, event: str, _: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(see)
    try:
        plan = make_plan(Facts(config, Memo(None), encoders=False), ["first"])
    finally:
        sys.setprofile(None)
    assert sum(len(each.items) for each in plan.orders)
    return count


def test_planning_grows_linearly_with_stale_targets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("data").mkdir()
    counts = []
    for end in range(STEP, 5 * STEP, STEP):
        for number in range(end - STEP, end):
            Path(f"data/{number}.png").write_text("no image is opened by a plan")
            Path(f"data/{number}.txt").write_text(f"caption {number}")
        counts.append(calls_of_a_plan())
    _, *more = (after - before for before, after in itertools.pairwise(counts))
    assert max(more) < 1.05 * min(more), counts
