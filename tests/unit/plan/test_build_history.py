"""History of builds: a line for each build that made something."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from latentmake.config import Dataset, Model
from latentmake.plan.build_history import HISTORY, RunningBuild, read_history
from latentmake.plan.orders import Target, WorkItem, WorkOrder
from latentmake.plan.receipts import Receipt

KEEP = 10**9


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def make_order(part: str, *stems: str) -> WorkOrder:
    model = Model.model_validate({"vae": "vae", "text": ["text"]})
    items = tuple(
        WorkItem(stem, f"{stem}.png", None, (Target(part, f"cache/{part}/{stem}", None),))
        for stem in stems
    )
    order = WorkOrder("latents", "cats", "small", Dataset(path="."), model, {"a": 1}, items)
    order.write()
    return order


def finish(order: WorkOrder, *done: str, counts: dict[str, int]) -> None:
    targets = {
        f"cache/{item.targets[0].part}/{item.stem}": [1, 2, 3, "key"] for item in order.items
    }
    made = {path: values for path, values in targets.items() if Path(path).name in done}
    Receipt({}, made, [], counts, 2.5, work=order.work, words="bottleneck: reading").write(
        order.receipt
    )


def test_a_build_that_made_nothing_leaves_no_line() -> None:
    RunningBuild([make_order("64", "a")], ["r"], ["caches_r"]).end(KEEP, succeeded=True)
    assert not HISTORY.exists()
    assert read_history() == []


def test_a_line_has_what_was_asked_made_and_how() -> None:
    orders = [make_order("64", "a", "b"), make_order("96", "a", "b")]
    build = RunningBuild(orders, ["r", "other"], ["train_r"])
    finish(orders[0], "a", "b", counts={"encoded": 1, "linked": 1, "kept": 0})
    finish(orders[1], "b", counts={"encoded": 1})
    (lock,) = [Path("runs/r/dataset.lock")]
    lock.parent.mkdir(parents=True)
    lock.touch()
    build.end(KEEP, succeeded=False)
    (found,) = read_history()
    assert not found.succeeded
    assert found.targets == ["train_r"]
    assert found.made == {"cats/small/64": 2, "cats/small/96": 1}
    assert found.ways == {"encoded": 2, "linked": 1}
    assert [*found.work["latents small"]] == [2, 5.0, "bottleneck: reading"]
    assert found.results == ["runs/r/dataset.lock"]
    assert {"latentmake", "python", "torch"} <= found.versions.keys()


def test_receipts_of_an_earlier_build_are_not_counted_again() -> None:
    order = make_order("64", "a")
    finish(order, "a", counts={"encoded": 1})
    build = RunningBuild([order], [], ["latents_r"])
    build._began = time.time() + 3600
    build.end(KEEP, succeeded=True)
    assert read_history() == []


def test_damaged_lines_are_left_out() -> None:
    line = {"began": 1.0, "seconds": 2.0, "succeeded": True, "targets": []}
    HISTORY.parent.mkdir()
    HISTORY.write_text(f'{json.dumps(line)}\n{{"beg\n[]\n{json.dumps(line | {"began": 3.0})}\n')
    assert [build.began for build in read_history()] == [1.0, 3.0]
    assert [build.began for build in read_history(last=1)] == [3.0]
