"""Forced targets are encoded again whatever is there or at hand; their keys and locks stay."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from latentmake.config.root import parse
from latentmake.data.memo import Memo
from latentmake.encode.reading import Loaded
from latentmake.plan import store
from latentmake.plan.facts import Facts
from latentmake.plan.orders import Order
from latentmake.plan.planner import make_plan
from latentmake.plan.run_plan import Plan
from order_world import Encoder, carry_out, order, put_image
from test_faults import MODELS, World, encoded

pytestmark = pytest.mark.usefixtures("own_folder")


def planned(world: World, *forced: str) -> Plan:
    facts = world.facts()
    facts.forced = {*forced}
    with facts.memo:
        return make_plan(facts, ["first"])


@pytest.mark.parametrize("layout", MODELS)
def test_what_is_forced_is_planned_and_nothing_else_and_the_lock_stays(layout: str) -> None:
    world = World(layout)
    assert world.build() == set()
    lock = Path("runs/first/dataset.lock").read_bytes()
    for forced in (["latents"], ["text"], ["latents", "text"]):
        plan = planned(world, "manifest_first", *(f"{kind}_first" for kind in forced))
        made = {kind for kind in forced if kind == "latents" or layout != "sd1"}
        assert {each.kind for each in plan.orders} == made and all(x.forced for x in plan.orders)
        states = plan.runs["first"].parts.items()
        stale = {
            part.name.split("@")[0]: [x.reason for x in found.to_make] for part, found in states
        }
        assert {name: each for name, each in stale.items() if each} == {
            {"latents": "64"}.get(kind, kind): ["forced", "forced"] for kind in made
        }
        run = plan.runs["first"]
        assert run.manifest_order is not None and run.lock is not None
    paths = [path for each in plan.orders for path in each.paths]
    before = {path: Path(path).stat().st_ino for path in paths}
    for each in plan.orders:
        carry_out(each, encoder=Loaded(encoded))
    assert all(Path(path).stat().st_ino != before[path] for path in paths)
    assert world.build() == set() and Path("runs/first/dataset.lock").read_bytes() == lock
    assert planned(world).orders == []


def test_a_file_that_is_forced_is_the_only_one_with_or_without_its_run() -> None:
    world = World("plain")
    world.build()
    path = "cache/cats/tiny/64/good.latents.safetensors"
    plan = planned(world, path)
    assert [each.paths for each in plan.orders] == [[path]] and plan.orders[0].forced
    assert plan.runs["first"].manifest_order is None
    for forced, is_ in ((path, True), ("latents", True), ("text", False)):  # the latter by rule
        facts = world.facts()
        facts.forced = {forced}
        orders = make_plan(facts, [], files=[path]).orders
        assert [(x.paths, x.forced) for x in orders] == [([path], True)] * is_


def test_what_is_at_hand_is_linked_unless_it_is_forced() -> None:
    world = World("plain")
    world.build()
    caption = Path("data/good.txt")
    text = caption.read_text()
    caption.write_text("an edited picture")
    world.build()
    caption.write_text(text)  # an edit that is undone
    assert [each.reuses for each in planned(world).orders] == [True]
    plan = planned(world, "text_first")
    assert [(each.forced, each.reuses, len(each.paths)) for each in plan.orders] == [
        (True, False, 2)
    ]
    (part,) = (found for part, found in plan.runs["first"].parts.items() if part.name == "text")
    assert sorted(each.reason for each in part.to_make) == ["edited", "forced"]
    assert plan.runs["first"].lock is None  # content decides, as without force


def test_the_plan_of_other_runs_forces_only_what_they_share() -> None:
    run = {"datasets": "cats", "model": "tiny"}
    values: dict[str, Any] = {
        "datasets": {"cats": {"path": "data"}},
        "models": {"tiny": MODELS["plain"]},
        "runs": {"a": {**run, "resolutions": [32]}, "b": {**run, "resolutions": [64]}},
    }
    facts = Facts(parse(values), Memo(None), encoders=False)
    facts.forced = {"latents_a"}
    assert facts.forced_of("cats", "tiny") == {"32"} and not facts.forced_of("dogs", "tiny")


def test_a_forced_job_encodes_what_is_there_or_in_the_store_and_equal_content_once() -> None:
    images: dict[str, Path | str] = {
        stem: put_image(Path(f"data/{stem}.png"), colour)
        for stem, colour in (("a", (9, 9, 9)), ("b", (9, 9, 9)), ("c", (1, 2, 3)))
    }
    made = order("latents", images)
    made.write()
    assert b"forced" not in made.path.read_bytes()  # so that its name is that of before
    carry_out(made, encoder=Loaded(Encoder()))
    store.keep([made])
    assert len(store.keys()) == 2
    forced = replace(made, forced=True)
    forced.write()
    forced = Order.read(forced.path)
    counts = carry_out(forced, encoder=Loaded(encoder := Encoder())).counts
    assert counts == {"encoded": 2, "spooled": 0, "linked": 1, "kept": 0}
    assert sorted(encoder.stems) == ["a", "c"] and not store.keys()
    # A job that is tried again, as on a cluster, keeps what it wrote.
    assert carry_out(forced, encoder=Loaded(encoder := Encoder())).counts["kept"] == 3
    assert not encoder.stems
