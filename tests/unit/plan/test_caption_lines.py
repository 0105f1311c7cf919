"""Captions of several lines: which lines are encoded, and the plan's word on caches of before.

Caches of before are written as earlier releases wrote them: of the first line where captions were
composed, else of the bytes of the caption file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from latentmake import digest
from latentmake.config.root import parse
from latentmake.files import atomic, cachefile, npz
from latentmake.index.memo import Memo
from latentmake.plan import manifest
from latentmake.plan.expected import expected_files, sources_of
from latentmake.plan.explained import explain
from latentmake.plan.facts import Facts
from latentmake.plan.manifest_job import plan_manifest
from latentmake.plan.planner import make_plan
from latentmake.plan.run_plan import RunPlan
from latentmake.plan.state import PartState
from latentmake.plan.target import Part
from latentmake.reports.recipe_changes import recipe_changes
from PIL import Image

CAPTIONS = {
    "one": "a cat, sitting\n",
    "two": "A cat sits.\nIt purrs.\n",
    "gap": "A dog runs.\n\nIt barks.",
}
PLAIN: dict[str, Any] = {"vae": "vae", "text": ["text"]}
SDXL: dict[str, Any] = {
    "layout": "sdscripts",
    "architecture": "sdxl",
    "vae": "vae",
    "text": ["text", "text_2"],
}
ALL_NOW = "captions: all lines are encoded; before, it was only the first"
FIRST_NOW = "captions: the first line is encoded, as sd-scripts reads it; before, it was all lines"


class Known(Facts):
    """Facts of models without weights."""

    def recipe(self, dataset: str, model: str, kind: str) -> dict[str, object]:
        return {"kind": kind}


@pytest.fixture(autouse=True)
def _project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("data").mkdir()
    for stem, text in CAPTIONS.items():
        Image.new("RGB", (64, 64)).save(f"data/{stem}.png")
        Path(f"data/{stem}.txt").write_bytes(text.encode())


def facts_of(model: Mapping[str, Any], **dataset: Any) -> Facts:
    """Return facts of a run over the dataset, by what is on the disk alone."""
    run = {"datasets": "cats", "model": "tiny", "resolutions": [64]}
    values = {
        "datasets": {"cats": {"path": "data", **dataset}},
        "models": {"tiny": {**model}},
        "runs": {"first": run},
    }
    return Known(parse(values), Memo(None), encoders=False)


def planned(facts: Facts) -> RunPlan:
    return make_plan(facts, ["first"]).runs["first"]


def stale(plan: RunPlan) -> dict[str, str]:
    """Return stem -> text, or path of the caption file, of each text that is to be encoded."""
    return {
        item.stem: item.text if item.source is None else item.source
        for order in plan.orders
        if order.kind == "text"
        for item, *_ in order.items
    }


def put(facts: Facts, sources: Mapping[str, bytes]) -> None:
    """Write a text cache for each stem, made of some bytes."""
    layout, recipe = facts.layout("tiny"), facts.recipe("cats", "tiny", "text")
    for stem, data in sources.items():
        folder = layout.folder("cats", "tiny", "text")
        (named,) = layout.named(folder, "text", stem, None, None)
        source = digest.of_bytes(data)
        key = cachefile.target_key(source, digest.of_value(recipe), "")
        stamp = cachefile.stamp(key=key, source=source, recipe=recipe)
        if layout.npz:
            content = npz.serialize({"x": np.ones(2, np.float32)}, stamp)
        else:
            content = cachefile.serialize({"x": torch.ones(2)}, stamp)
        atomic.write(named.path, content)


def put_files(facts: Facts) -> None:
    """Write the text caches of captions that are encoded as their files have them."""
    put(facts, {stem: Path(f"data/{stem}.txt").read_bytes() for stem in CAPTIONS})


def first_lines() -> dict[str, bytes]:
    return {stem: text.strip().split("\n")[0].encode() for stem, text in CAPTIONS.items()}


# -- lines ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dataset", [{}, {"captions": {"seed": 0}}, {"tags_extension": ".tags"}], ids=str
)
def test_all_lines_of_a_caption_are_encoded_with_any_setting(dataset: dict[str, Any]) -> None:
    items, _ = facts_of(PLAIN, **dataset).items("cats", "tiny")
    files = {item.stem for item in items if item.texts is None}
    texts = {item.stem: item.texts for item in items if item.texts is not None}
    assert files == set() if dataset else CAPTIONS.keys()
    assert not dataset or texts == {stem: [text.strip()] for stem, text in CAPTIONS.items()}


def test_sdscripts_takes_the_first_line_with_any_setting() -> None:
    for dataset in ({}, {"captions": {"seed": 0}}, {"tags_extension": ".tags"}):
        plan = planned(facts_of(SDXL, **dataset))
        texts = stale(plan)
        one = "data/one.txt" if not dataset else "a cat, sitting"
        assert texts == {"one": one, "two": "A cat sits.", "gap": "A dog runs."}


def test_a_plan_says_which_captions_gain_lines_and_leaves_the_others() -> None:
    facts = facts_of(PLAIN, captions={"caption_prefix": "photo:"})
    put(facts, {stem: b"photo: " + line for stem, line in first_lines().items()})
    plan = planned(facts)
    assert stale(plan) == {
        "two": "photo: A cat sits.\nIt purrs.",
        "gap": "photo: A dog runs.\n\nIt barks.",
    }
    assert [*recipe_changes(facts, [plan])] == [f"{ALL_NOW}: 2 texts of cats"]
    reasons = {each.path: each.reason for each in explain(facts, "data/two.txt")}
    told = ALL_NOW.removeprefix("captions: ")
    assert reasons["cache/cats/tiny/text/two.text.safetensors"] == f"changed recipe: {told}"


def test_a_plan_says_which_captions_of_sdscripts_lose_lines_and_leaves_the_others() -> None:
    facts = facts_of(SDXL)
    put_files(facts)
    plan = planned(facts)
    assert stale(plan) == {"two": "A cat sits.", "gap": "A dog runs."}
    texts = [work for order in plan.orders if order.kind == "text" for work in order.items]
    assert [work.content for work in texts] == [None, None]  # not the digest of the whole file
    assert [*recipe_changes(facts, [plan])] == [f"{FIRST_NOW}: 2 texts of cats"]


def test_an_edit_is_no_change_of_a_rule() -> None:
    facts = facts_of(SDXL)
    put_files(facts)
    Path("data/two.txt").write_text("A cat sleeps.\nIt purrs.\n")
    plan = planned(facts)
    assert [*recipe_changes(facts, [plan])] == [f"{FIRST_NOW}: 1 text of cats"]


def test_a_line_of_several_by_a_wildcard_stays_as_it_was() -> None:
    for model in (PLAIN, SDXL):
        (item,) = (
            item
            for item in facts_of(model, captions={"enable_wildcard": True}).items("cats", "tiny")[0]
            if item.stem == "gap"
        )
        assert item.former is None
        assert item.texts in (["A dog runs."], ["It barks."])


def test_an_empty_first_line_is_a_fault_for_sdscripts() -> None:
    Path("data/two.txt").write_text("\nIt purrs.\n")
    for dataset in ({}, {"captions": {"seed": 0}}):
        _, (fault,) = facts_of(SDXL, **dataset).items("cats", "tiny")
        assert fault.line.startswith("data/two.txt: has an empty first line, and sd-scripts reads")
        items, faults = facts_of(SDXL, empty_caption="allow", **dataset).items("cats", "tiny")
        assert not faults and [item.texts for item in items if item.stem == "two"] == [[""]]


# -- line ends ------------------------------------------------------------------------------------


def with_line_ends(text: str, ends: str, mark: str) -> bytes:
    return (mark + text.replace("\n", ends)).encode()


FORMS = [("\n", ""), ("\r\n", ""), ("\n", "\ufeff"), ("\r\n", "\ufeff")]


@pytest.mark.parametrize("before", FORMS)
@pytest.mark.parametrize("now", FORMS)
def test_line_ends_and_a_byte_order_mark_make_no_text_stale(
    before: tuple[str, str], now: tuple[str, str]
) -> None:
    facts = facts_of(PLAIN)
    put(facts, {stem: with_line_ends(text, *before) for stem, text in CAPTIONS.items()})
    for stem, text in CAPTIONS.items():
        Path(f"data/{stem}.txt").write_bytes(with_line_ends(text, *now))
    assert stale(planned(facts)) == {}
    assert {each.state for each in explain(facts, "data/two.txt") if "/text/" in each.path} == {
        "fresh"
    }
    files = expected_files(facts, "cats", "tiny", sources_of(facts, "cats", "tiny", ["text"]))
    assert all(cachefile.read_header(each.path).key == each.key for each in files)
    Path("data/two.txt").write_bytes(with_line_ends("A cat sits. It purrs.\n", *now))
    assert stale(planned(facts_of(PLAIN))) == {"two": "data/two.txt"}


# -- trainers that encode captions themselves -----------------------------------------------------


def test_a_plan_says_why_a_trainer_that_encodes_captions_trains_again() -> None:
    facts = facts_of({**SDXL, "architecture": "sd1", "text": ["text"]})
    latents = Part("cats", "tiny", "64")
    plan = RunPlan("first", {latents: PartState()}, images={"cats": ""})
    before = {stem: digest.of_file(Path(f"data/{stem}.txt")) for stem in sorted(CAPTIONS)}
    keys = {
        "cats/64": plan.parts[latents].keys or "",
        f"cats/{manifest.CAPTIONS}": manifest.keys_digest(before.items()),
    }
    lock = Path("runs/first/dataset.lock")
    lock.parent.mkdir(parents=True)
    lock.write_text(json.dumps({"digest": manifest.lock_digest(keys, {"cats": 1})}))
    plan_manifest(facts, plan, facts.config.runs["first"])
    assert plan.manifest_order is not None
    assert [*recipe_changes(facts, [plan])] == [f"{FIRST_NOW}: 2 texts of cats"]
    lock.write_text(json.dumps({"digest": "of other captions"}))
    other = RunPlan("first", {latents: PartState()}, images={"cats": ""})
    plan_manifest(facts, other, facts.config.runs["first"])
    assert [*recipe_changes(facts, [other])] == []
