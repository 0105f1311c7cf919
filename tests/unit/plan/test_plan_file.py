"""What a process on a cluster carries out is what its own plan said, whoever plans beside it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from latentmake.errors import LatentmakeError
from latentmake.plan.orders import EncodingJob, Order
from latentmake.plan.plan_file import VARIABLE, PlanFile
from order_world import order


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(VARIABLE, "")


def written(*stems: str) -> list[Order]:
    orders = []
    for stem in stems:
        orders.append(order("text", {stem: f"caption of {stem}"}))
        orders[-1].write()
    return orders


def test_a_process_without_a_plan_has_no_orders() -> None:
    assert PlanFile.read() == PlanFile()


def test_a_plan_is_handed_on_through_the_environment() -> None:
    one, other = written("a", "b")
    runs = {"first": {"train": ".latentmake/runs/first.5.train.json"}}
    jobs = {"encode_a": [one.name], "encode_b": [other.name, one.name]}
    before = PlanFile(jobs=jobs, singles={"cache/x": one.name}, runs=runs)
    before.write(5)
    given = PlanFile.read()
    assert given == before
    both = EncodingJob((other, one))
    assert given.encoding_jobs() == [EncodingJob((one,)), both]
    assert given.encoding_jobs(["encode_b", "manifest"]) == [both]
    assert given.single("cache/x") == one and given.single("cache/y") is None


def test_orders_of_another_plan_are_none_of_its_business() -> None:
    one, other = written("a", "b")
    PlanFile(jobs={"encode_a": [one.name]}).write(5)
    given = PlanFile.read()
    assert given.encoding_jobs() == [EncodingJob((one,))]
    other.path.write_text("{")  # whatever becomes of it
    assert given.encoding_jobs() == [EncodingJob((one,))]


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_text("{")])
def test_an_order_that_is_gone_or_damaged_is_named(damage: Callable[[Path], object]) -> None:
    (one,) = written("a")
    PlanFile(jobs={"encode_a": [one.name]}).write(5)
    damage(one.path)
    given = PlanFile.read()
    with pytest.raises(LatentmakeError, match=f"{one.name}.json is not a work order"):
        given.encoding_jobs()


def test_a_plan_that_is_gone_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "plan.5.json")
    with pytest.raises(LatentmakeError, match="is not a plan"):
        PlanFile.read()
