"""What a process on a cluster carries out is what its own plan said, whoever plans beside it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from latentmake.errors import LatentmakeError
from latentmake.plan.orders import WorkOrder
from latentmake.plan.plan_file import VARIABLE, Handover
from order_world import order


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(VARIABLE, "")


def written(*stems: str) -> list[WorkOrder]:
    orders = []
    for stem in stems:
        orders.append(order("text", {stem: f"caption of {stem}"}))
        orders[-1].write()
    return orders


def test_a_process_that_was_handed_nothing_knows_it() -> None:
    assert Handover.given() is None


def test_a_plan_is_handed_on_through_the_environment() -> None:
    one, other = written("a", "b")
    runs = {"first": {"train": ".latentmake/runs/first.5.train.json"}}
    before = Handover({one.rule: one.name, other.rule: other.name}, {"cache/x": one.name}, runs)
    path = before.write(5)
    assert os.environ[VARIABLE] == str(path)
    given = Handover.given()
    assert given == before
    assert given is not None and given.orders() == [one, other]
    assert given.orders([other.rule, "manifest"]) == [other]
    assert given.single("cache/x") == one and given.single("cache/y") is None


def test_orders_of_another_plan_are_none_of_its_business() -> None:
    one, other = written("a", "b")
    Handover({one.rule: one.name}).write(5)
    given = Handover.given()
    assert given is not None and given.orders() == [one]
    other.path.write_text("{")  # whatever becomes of it
    assert given.orders() == [one]


def test_an_order_that_is_gone_is_named() -> None:
    (one,) = written("a")
    Handover({one.rule: one.name}).write(5)
    one.path.unlink()
    given = Handover.given()
    assert given is not None
    with pytest.raises(LatentmakeError, match=one.name):
        given.orders()
