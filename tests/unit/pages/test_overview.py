"""A status says how fast past jobs were, and how far the builds are that run."""

from __future__ import annotations

import os
from pathlib import Path

from latentmake.config.root import parse
from latentmake.data.memo import Memo
from latentmake.pages.overview import running_builds, status_of
from latentmake.plan.build_locks import announce
from latentmake.plan.estimates import Past, learn_job
from latentmake.plan.facts import Facts
from latentmake.plan.planner import make_plan
from order_world import written_order

CONFIG = {
    "datasets": {"cats": {"path": "data"}},
    "models": {"tiny": {"vae": "vae", "text": "text"}},
    "runs": {"first": {"datasets": "cats", "model": "tiny", "resolutions": [64, 96]}},
}


def test_status_names_the_bottleneck_of_past_jobs_once_a_model(working: Path) -> None:
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


def test_targets_of_running_builds_count_once_they_are_no_longer_what_was_found(
    working: Path,
) -> None:
    Path("b").touch()
    os.utime("b", ns=(5, 5))
    orders = [written_order("latents", a=None, b="key@5", c=None), written_order("text", d=None)]
    held = announce(orders, ["r"], ["train_r"])
    assert held is not None
    (found,) = running_builds()
    assert (found["process"], found["targets"]) == (os.getpid(), ["train_r"])
    assert found["made"] == {"latents small": (0, 3), "text small": (0, 1)}
    assert found["training"] == {"r": ""}
    for made in "abd":
        Path(made).touch()
    log = Path("logs/train/r.log")
    log.parent.mkdir(parents=True)
    log.write_text("begun\nr:  1%|\rr: 50%| 100/200\r")
    (found,) = running_builds()
    assert found["made"] == {"latents small": (2, 3), "text small": (1, 1)}
    assert found["training"] == {"r": "r: 50%| 100/200"}
    os.utime(log, (found["began"] - 9, found["began"] - 9))  # of an earlier training
    assert running_builds()[0]["training"] == {"r": ""}
    held.close()
    assert running_builds() == []
