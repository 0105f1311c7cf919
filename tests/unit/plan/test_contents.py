"""Contents of captions: which lines are encoded, and that line ends make nothing stale."""

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
from latentmake.plan.facts import Facts
from latentmake.plan.manifest import Lock, keys_digest, lock_digest
from latentmake.plan.orders import Part
from latentmake.plan.planner import make_plan
from latentmake.plan.run_plan import RunPlan, plan_manifest
from latentmake.plan.state import PartState
from latentmake.words.file_origin import explanations
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
        item.stem: (item.text or "") if item.source is None else item.source
        for order in plan.orders
        if order.kind == "text"
        for item, *_ in order.items
    }


def put(facts: Facts, sources: Mapping[str, bytes]) -> None:
    """Write a text cache for each stem, made of some bytes."""
    layout, recipe = facts.layout("tiny"), facts.recipe("cats", "tiny", "text")
    for stem, data in sources.items():
        folder = layout.folder("cats", "tiny", "text")
        ((path, _),) = layout.named(folder, "text", stem, None, None)
        source = digest.of_bytes(data)
        key = cachefile.target_key(source, digest.of_value(recipe), "")
        stamp = cachefile.stamp(key=key, source=source, recipe=recipe)
        if layout.npz:
            content = npz.serialize({"x": np.ones(2, np.float32)}, stamp)
        else:
            content = cachefile.serialize({"x": torch.ones(2)}, stamp)
        atomic.write(path, content)


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
    assert {
        each.state for each in explanations(facts, "data/two.txt") if "/text/" in each.path
    } == {"fresh"}
    Path("data/two.txt").write_bytes(with_line_ends("A cat sits. It purrs.\n", *now))
    assert stale(planned(facts_of(PLAIN))) == {"two": "data/two.txt"}


# -- trainers that encode captions themselves -----------------------------------------------------


def test_a_trainer_that_encodes_captions_itself_trains_on_those_of_its_lock() -> None:
    model = {**SDXL, "architecture": "sd1", "text": ["text"]}
    latents, folder = Part("cats", "tiny", "64"), Path("runs/first")

    def plan() -> RunPlan:
        found = RunPlan("first", {latents: PartState()}, images={"cats": ""})
        facts = facts_of(model)
        plan_manifest(facts, found)
        return found

    texts = [(stem, lines.decode()) for stem, lines in sorted(first_lines().items())]
    digests = [(stem, digest.of_value([line])) for stem, line in texts if stem != "one"]
    digests.append(("one", digest.of_file(Path("data/one.txt"))))
    keys = {
        "cats/64": PartState().keys or "",
        f"cats/{manifest.CAPTIONS}": keys_digest(sorted(digests)),
    }
    folder.mkdir(parents=True)
    (folder / "manifest.jsonl").touch()
    made = Lock(
        lock_digest(keys, {"cats": 1}),
        parts=keys,
        repeats={"cats": 1},
        images={"cats": ""},
        manifest=digest.of_bytes(b""),
    )
    (folder / "dataset.lock").write_text(json.dumps(vars(made)))
    assert plan().manifest_order is None
    Path("data/two.txt").write_text("A cat sits.\nIt sleeps.\n")
    assert plan().manifest_order is None  # not a line that it reads
    Path("data/two.txt").write_text("A cat sleeps.\n")
    assert plan().manifest_order is not None
