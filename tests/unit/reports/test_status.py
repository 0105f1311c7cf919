"""The status of a run says how fast past jobs were, and what kept them from being faster."""

from __future__ import annotations

from pathlib import Path

import pytest
from latentmake.config.root import parse
from latentmake.index.memo import Memo
from latentmake.plan.estimates import Past, learn_job
from latentmake.plan.facts import Facts
from latentmake.plan.planner import make_plan
from latentmake.reports.status import status_of

CONFIG = {
    "datasets": {"cats": {"path": "data"}},
    "models": {"tiny": {"vae": "vae", "text": "text"}},
    "runs": {"first": {"datasets": "cats", "model": "tiny", "resolutions": [64, 96]}},
}


def test_status_names_the_bottleneck_of_past_jobs_once_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("data").mkdir()
    for ending in ("png", "txt"):
        Path(f"data/a.{ending}").write_text("a")
    with Memo(None) as memo:
        words = "device busy 40%, bottleneck: reading"
        learn_job(memo, "latents tiny", Past(9000, 6.0, words=words))
        learn_job(memo, "latents tiny", Past(3000, 3.0))  # a short one
        memo.save()
        config = parse(CONFIG)
        facts = Facts(config, memo, encoders=False)
        plan = make_plan(facts, ["first"])
        lines = status_of(facts, plan.runs["first"]).lines
    assert [line for line in lines if line.startswith("past jobs")] == [
        "past jobs of latents of tiny: 1,250 targets/s, device busy 40%, bottleneck: reading"
    ]
