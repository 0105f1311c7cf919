"""Others see a build while its process lives, and how far it is by what lies on the disk."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from latentmake.config.datasets import Dataset
from latentmake.config.models import Model
from latentmake.errors import StorageError
from latentmake.plan.orders import Target, WorkItem, WorkOrder
from latentmake.plan.receipts import Receipt
from latentmake.plan.running import BUILDS, announce, running_builds


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def make_order(kind: str, **found: str | None) -> WorkOrder:
    model = Model.model_validate({"vae": "vae", "text": ["text"]})
    items = tuple(
        WorkItem(stem, f"{stem}.png", None, (Target("64", stem, there),))
        for stem, there in found.items()
    )
    order = WorkOrder(kind, "cats", "small", Dataset(path="."), model, {"a": 1}, items)
    order.write()
    return order


def test_targets_count_once_they_are_no_longer_what_was_found() -> None:
    Path("b").touch()
    os.utime("b", ns=(5, 5))
    orders = [make_order("latents", a=None, b="key@5", c=None), make_order("text", d=None)]
    held = announce(orders, ["r"], ["train_r"])
    assert held is not None
    (build,) = running_builds()
    assert (build.process, build.targets) == (os.getpid(), ["train_r"])
    assert build.made == {"latents small": (0, 3), "text small": (0, 1)}
    assert build.training == {"r": ""}
    Path("a").touch()
    Path("b").touch()
    Receipt({}, {}, [], {}, 1.0).write(orders[1].receipt)
    log = Path("logs/train/r.log")
    log.parent.mkdir(parents=True)
    log.write_text("begun\nr:  1%|\rr: 50%| 100/200\r")
    (build,) = running_builds()
    assert build.made == {"latents small": (2, 3), "text small": (1, 1)}
    assert build.training == {"r": "r: 50%| 100/200"}
    os.utime(log, (build.began - 9, build.began - 9))  # of an earlier training
    assert running_builds()[0].training == {"r": ""}
    held.close()
    assert running_builds() == []


def test_what_a_running_build_makes_is_made_by_no_other() -> None:
    orders = [make_order("latents", a=None), make_order("text", b=None)]
    held = announce(orders, ["r", "other"], ["train_r"])
    assert held is not None
    for targets in (["train_r"], ["latents_r"], []):
        with pytest.raises(StorageError, match=r"another build makes .*\(train_r, "):
            announce(orders, ["r"], targets)
    with pytest.raises(StorageError, match="wait until it ends"):
        announce([], ["r"], ["train_r"])
    assert announce([], ["r"], ["check_r"]) is None
    for made in ([], orders[:0]):
        beside = announce(made, ["other"], ["train_other"])
        assert beside is not None
        beside.close()
    held.close()
    again = announce(orders, ["r"], ["train_r"])
    assert again is not None
    again.close()


def test_what_builds_nothing_is_not_seen() -> None:
    assert announce([], ["r"], ["check_r"]) is None
    assert not BUILDS.exists()
