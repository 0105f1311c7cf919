"""Contents of captions: which lines are encoded; a caption that is saved again is not stale."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from latentmake.base import atomic, digest
from latentmake.commands.file_origin import explanations
from latentmake.config.root import parse
from latentmake.data.memo import Memo
from latentmake.encode.runner import carry_out
from latentmake.formats import cachefile, npz
from latentmake.plan import manifest
from latentmake.plan.facts import Facts
from latentmake.plan.judge import PartState
from latentmake.plan.manifest import Lock, keys_digest, lock_digest
from latentmake.plan.orders import Part
from latentmake.plan.planner import make_plan
from latentmake.plan.receipts import read_receipt
from latentmake.plan.run_plan import RunPlan, plan_manifest
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


def put(facts: Facts, sources: Mapping[str, bytes], captions: Mapping[str, str] = {}) -> None:
    """Write a text cache for each stem, made of some bytes, as releases before 0.3 did."""
    layout, recipe = facts.layout("tiny"), facts.recipe("cats", "tiny", "text")
    for stem, data in sources.items():
        folder = layout.folder("cats", "tiny", "text")
        ((path, _),) = layout.named(folder, "text", stem, None, None)
        source = digest.of_bytes(data)
        key = cachefile.target_key(source, digest.of_value(recipe), "")
        stamp = cachefile.stamp(key=key, source=source, recipe=recipe)
        stamp |= {"caption": captions[stem]} if stem in captions else {}
        if layout.npz:
            content = npz.serialize({"x": np.ones(2, np.float32)}, stamp)
        else:
            content = cachefile.serialize({"x": torch.ones(2)}, stamp)
        atomic.write(path, content)


def first_lines() -> dict[str, bytes]:
    return {stem: text.strip().split("\n")[0].encode() for stem, text in CAPTIONS.items()}


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


def saved(text: str, form: str) -> bytes:
    """Return the bytes of a caption file in one of the forms that editors and tools write."""
    ends = "\r\n" if "\r" in form else "\n"
    return form.format(text.strip().replace("\n", ends)).encode()


FORMS = ["{}", "{}\n", "{}\r\n", "\ufeff{}\n", "\ufeff{}\r\n", "{} \n", "{}\n\n"]


@pytest.mark.parametrize("before", FORMS)
@pytest.mark.parametrize("now", [*FORMS, " {} \r\n", "\ufeff\n\t{}"])
def test_a_caption_saved_again_makes_no_text_stale(before: str, now: str) -> None:
    facts = facts_of(PLAIN)
    put(facts, {stem: saved(text, before) for stem, text in CAPTIONS.items()})
    for stem, text in CAPTIONS.items():
        Path(f"data/{stem}.txt").write_bytes(saved(text, now))
    assert stale(planned(facts)) == {}
    assert {
        each.state for each in explanations(facts, "data/two.txt") if "/text/" in each.path
    } == {"fresh"}
    Path("data/two.txt").write_bytes(saved("A cat sits. It purrs.", now))
    assert stale(planned(facts_of(PLAIN))) == {"two": "data/two.txt"}


def test_a_header_with_the_caption_tells_that_it_is_the_same() -> None:
    facts = facts_of(PLAIN)
    forms = {stem: saved(text, "\t {} \t") for stem, text in CAPTIONS.items()}
    put(facts, forms, {stem: text.strip() for stem, text in CAPTIONS.items()})
    assert stale(planned(facts)) == {}
    put(facts, forms, {"one": "a dog", "two": "A cat sits."})
    assert stale(planned(facts)).keys() == CAPTIONS.keys()


def test_texts_of_an_earlier_release_are_at_hand_for_an_item_of_another_name() -> None:
    facts = facts_of(PLAIN)
    put(facts, {stem: text.encode() for stem, text in CAPTIONS.items()})
    for path in [*Path("data").iterdir()]:
        path.rename(path.with_stem(f"{path.stem}_new"))
    orders = [order for order in planned(facts).orders if order.kind == "text"]
    assert [order.reuses for order in orders] == [True]
    carry_out(orders, say=lambda _: None, load=lambda _: pytest.fail("it encodes"))
    assert read_receipt(orders[0].receipt).counts["linked"] == len(CAPTIONS)
    assert stale(planned(facts_of(PLAIN))) == {}


def test_a_trainer_that_encodes_captions_itself_trains_on_those_of_its_lock() -> None:
    model = {**SDXL, "architecture": "sd1", "text": ["text"]}
    latents, folder = Part("cats", "tiny", "64"), Path("runs/first")
    memo = Memo(Path("memo.sqlite"))
    memo.digest_of_file(Path("data/one.txt"))  # as the release did that wrote the lock
    Image.new("RGB", (64, 64)).save("data/bare.png")  # a lock of that release has "" for no caption

    def plan() -> RunPlan:
        found = RunPlan("first", {latents: PartState(fresh=1)}, images={"cats": ""})
        facts = facts_of(model, missing_caption="empty")
        facts.memo = memo
        plan_manifest(facts, found)
        return found

    texts = [(stem, lines.decode()) for stem, lines in sorted(first_lines().items())]
    digests = [(stem, digest.of_value([line])) for stem, line in texts if stem != "one"]
    digests += [("one", digest.of_file(Path("data/one.txt"))), ("bare", "")]
    keys = {
        "cats/64": PartState().keys or "",
        f"cats/{manifest.CAPTIONS}": keys_digest(sorted(digests)),
    }
    folder.mkdir(parents=True)
    (folder / "manifest.jsonl").touch()
    made = Lock(
        digest=lock_digest(keys, {"cats": 1}),
        parts=keys,
        repeats={"cats": 1},
        images={"cats": ""},
        manifest=digest.of_bytes(b""),
    )
    (folder / "dataset.lock").write_text(json.dumps(vars(made)))
    assert plan().manifest_order is None
    Path("data/two.txt").write_text("A cat sits.\nIt sleeps.\n")
    assert plan().manifest_order is None  # not a line that it reads
    Path("data/one.txt").write_bytes(b"\xef\xbb\xbfa cat, sitting \r\n")
    assert plan().manifest_order is None
    known, memo = memo, Memo(None)  # without it, nothing tells what the file was
    assert [str(each) for each in plan().outdated] == [
        "captions of cats were edited or saved again, and a lock of an earlier release cannot "
        "tell which"
    ]
    memo = known
    Path("data/two.txt").write_text("A cat sleeps.\n")
    assert plan().manifest_order is not None
