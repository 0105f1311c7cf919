"""A fault in a new folder is a fault in a built one, whatever caches are at hand; it has its file.

Each case builds good items, damages one, caches what it can of it under tolerant settings or for
another dataset, and builds under strict ones. The faults are those of a build without any caches.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from latentmake.base.errors import DatasetError, SourceError
from latentmake.commands.check import _of_items
from latentmake.commands.file_origin import explanations
from latentmake.config.root import parse
from latentmake.data.memo import Memo
from latentmake.encode import runner as encode
from latentmake.encode.reading import Loaded, Sample
from latentmake.layouts.names import encoder_name
from latentmake.pages.overview import status_of
from latentmake.plan import store
from latentmake.plan.facts import Facts
from latentmake.plan.manifest import ManifestOrder, read_lock
from latentmake.plan.planner import make_plan
from latentmake.runs.rows import write_manifest
from order_world import put_image, silent, whole_numbers

pytestmark = pytest.mark.usefixtures("own_folder")

TINY: dict[str, Any] = {"vae": "vae", "text": ["text"]}
MODELS: dict[str, dict[str, Any]] = {
    "plain": TINY,
    "musubi": {**TINY, "text": "text", "dit": "dit", "task": "t2v-1.3B"},
    "sdscripts": {**TINY, "layout": "sdscripts", "architecture": "sdxl", "text": ["text", "two"]},
    "sd1": {**TINY, "layout": "sdscripts", "architecture": "sd1"},
}


class Known(Facts):
    """Facts of models without weights."""

    def recipe(self, dataset: str, model: str, kind: str) -> dict[str, object]:
        return {"kind": kind}


def encoded(samples: list[Sample]) -> Iterator[tuple[dict[str, torch.Tensor], dict[str, str]]]:
    """Return tensors that fit all layouts."""
    for sample in samples:
        tensor = whole_numbers(sample.content)
        named = {
            f"{encoder_name(n)}.{x}": tensor for n in range(2) for x in ("hidden_state", "pooled")
        }
        yield ({"latents": tensor} if not isinstance(sample.content, str) else named), {}


class World:
    """A dataset of two pictures, of which `bad` is damaged, built for one layout."""

    def __init__(self, layout: str) -> None:
        self.model = MODELS[layout]
        for number, stem in enumerate(("good", "bad")):
            put_image(Path(f"data/{stem}.png"), (40 + number, 90, 9), (64, 64))
            Path(f"data/{stem}.txt").write_text(f"a {stem} picture\n")

    def facts(self, dataset: str = "cats", **settings: Any) -> Facts:
        run = {"datasets": dataset, "model": "tiny", "resolutions": [64]}
        values = {
            "datasets": {dataset: {"path": "data", **settings}},
            "models": {"tiny": self.model},
            "runs": {"first": run},
        }
        return Known(parse(values), Memo(Path(".latentmake/memo.sqlite")), encoders=False)

    def build(self, dataset: str = "cats", **settings: Any) -> set[str]:
        """Build; return the lines of all faults."""
        facts, said = self.facts(dataset, **settings), list[str]()
        with facts.memo:
            plan = make_plan(facts, ["first"])
        run = plan.runs["first"]
        store.keep(plan.orders)
        for job in plan.jobs:
            with contextlib.suppress(SourceError):
                encode.carry_out(job.orders, say=said.append, load=lambda _: Loaded(encoded))
        lines = {x.removeprefix("faulty: ") for x in said if x.startswith("faulty: ")}
        lines |= {fault.line for found in run.faults.values() for fault in found}
        receipts = [order.receipt for order in plan.orders]
        if run.manifest_order is not None and all(map(Path.exists, receipts)):
            order = ManifestOrder.read(run.manifest_order)
            with contextlib.suppress(DatasetError):
                Path("runs/first").mkdir(parents=True, exist_ok=True)
                write_manifest(order, receipts, Path("runs/first"), silent)
        return lines

    def checked(self, **settings: Any) -> set[str]:
        """Return what `latentmake check` says of the items, and `latentmake status` as well."""
        facts = self.facts(**settings)
        with facts.memo:
            plan = make_plan(facts, ["first"]).runs["first"]
            found = [x for x in _of_items(facts, plan) if x.verdict != "ok"]
            lines = {each.note.removeprefix("skipped: ") for each in found}
            assert {*status_of(facts, plan).faulty} == lines
        return lines


class Case(NamedTuple):
    """Damage to `bad`, settings under which it may be cached, and strict ones."""

    damage: Callable[[], object]
    file: str
    tolerant: dict[str, Any] = {}  # noqa: RUF012 -- never changed
    strict: dict[str, Any] = {}  # noqa: RUF012


CAPTION, IMAGE = Path("data/bad.txt"), Path("data/bad.png")
ALLOWED = {"empty_caption": "allow"}


def caption(data: bytes) -> Callable[[], object]:
    return lambda: CAPTION.write_bytes(data)


def image(change: Callable[[bytes], bytes]) -> Callable[[], object]:
    return lambda: IMAGE.write_bytes(change(IMAGE.read_bytes()))


def listed() -> None:
    Path("data/meta.jsonl").write_text(json.dumps({"file_name": "bad.png", "caption": "another"}))


CASES = {
    "empty caption": Case(caption(b""), "bad.txt", ALLOWED),
    "caption of spaces": Case(caption(BOM_UTF8 + b" \r\n\t"), "bad.txt", ALLOWED),
    "no caption": Case(CAPTION.unlink, "bad.png", {"class_tokens": "a picture"}),
    "no caption at all": Case(CAPTION.unlink, "bad.png", {"missing_caption": "empty"}),
    "not UTF-8": Case(caption("grün".encode("latin-1")), "bad.txt"),
    "UTF-16": Case(caption(b"a\0b\0"), "bad.txt"),
    "too long": Case(caption(b"a" * 1_000_001), "bad.txt"),
    "braces": Case(caption(b"a {cat"), "bad.txt", strict={"captions": {"enable_wildcard": True}}),
    "differs": Case(
        listed,
        "bad.txt",
        {"metadata_file": "data/meta.jsonl", "metadata_captions": "override"},
        {"metadata_file": "data/meta.jsonl"},
    ),
    "too many pixels": Case(
        lambda: put_image(IMAGE, (1, 2, 3), (64, 80)), "bad.png", strict={"max_image_pixels": 5000}
    ),
    "too narrow": Case(
        lambda: put_image(IMAGE, (1, 2, 3), (2, 200)), "bad.png", strict={"max_image_pixels": 5000}
    ),
    "cut short": Case(image(lambda data: data[:90]), "bad.png"),
    "no image": Case(image(lambda _: b"Dear Sir"), "bad.png"),
    "empty image": Case(image(lambda _: b""), "bad.png"),
    "file of a terabyte": Case(lambda: os.truncate(IMAGE, 1 << 40), "bad.png"),
    "two of one stem": Case(lambda: shutil.copy(IMAGE, "data/bad.jpg"), "bad.jpg"),
    "picture that cannot be read": Case(lambda: IMAGE.rename("data/bad.heic"), "bad.heic"),
    "unusable name": Case(lambda: IMAGE.rename(f"data/{'a' * 240}.png"), "a.png"),
}


@pytest.mark.parametrize("layout", MODELS)
@pytest.mark.parametrize("name", CASES)
def test_a_fault_in_a_new_folder_is_one_in_a_built_folder_and_has_its_file(
    name: str, layout: str
) -> None:
    case, world = CASES[name], World(layout)
    assert world.build() == set()
    case.damage()
    world.build("dogs", **case.tolerant)  # which caches what it can
    linked = world.build(**case.strict)
    world.build(**case.tolerant)
    built = [world.build(**case.strict), world.build(**case.strict), world.checked(**case.strict)]
    skipping = {**case.strict, "on_error": "skip"}
    world.build(**skipping)
    skipped = world.checked(**skipping)
    for folder in ("cache", ".latentmake", "runs"):
        shutil.rmtree(folder, ignore_errors=True)
    new = world.build(**case.strict)
    assert any(case.file in line.split(": ")[0] for line in new), new
    assert [linked, *built, skipped] == [new] * 5


@pytest.mark.parametrize("layout", MODELS)
def test_captions_saved_again_change_neither_caches_nor_lock(layout: str) -> None:
    world, lock = World(layout), Path("runs/first/dataset.lock")
    assert world.build() == set()
    before = lock.read_bytes(), sorted(Path("cache").rglob("*"))
    for form in ("{}", " {} \r\n", "\ufeff{}\n\n"):
        for stem in ("good", "bad"):
            Path(f"data/{stem}.txt").write_bytes(form.format(f"a {stem} picture").encode())
        plan = make_plan(world.facts(), ["first"]).runs["first"]
        assert plan.orders == [] and plan.manifest_order is None
        shutil.rmtree("cache")  # and a text that is encoded again has the same key
        assert world.build() == set()
        assert (lock.read_bytes(), sorted(Path("cache").rglob("*"))) == before
    CAPTION.write_text("another picture")
    assert make_plan(world.facts(), ["first"]).runs["first"].outdated


@pytest.mark.parametrize("layout", MODELS)
def test_a_skipped_item_that_goes_leaves_the_lock_and_one_that_is_refused_does_not(
    layout: str,
) -> None:
    world = World(layout)
    Path("data/bad.png").write_text("no picture")
    world.build(on_error="skip")
    before = read_lock("first")
    assert before.aside
    for path in Path("data").glob("bad.*"):
        path.unlink()
    plan = make_plan(world.facts(on_error="skip"), ["first"]).runs["first"]
    assert plan.manifest_order and plan.outdated and plan.lock == before.data
    world.build(on_error="skip")
    assert (after := read_lock("first")).digest == before.digest and not after.aside
    put_image(Path("data/mute.png"), (1, 2, 3), (64, 64))  # it has no caption
    assert make_plan(world.facts(), ["first"]).runs["first"].lock is None


@pytest.mark.parametrize("on_error", ["skip", "fail"])
def test_a_file_that_a_faulty_picture_keeps_from_being_made_is_explained_by_the_fault(
    on_error: str,
) -> None:
    world = World("plain")
    Path("data/bad.png").write_text("no picture")
    (line,) = world.build(on_error=on_error)
    explained = explanations(world.facts(on_error=on_error), "data/bad.png")
    assert [(each.state, each.reason) for each in explained] == [
        ("stale", f"new; its item is faulty: {line}"),
        ("fresh", ""),  # its text
    ]
    put_image(Path("data/bad.png"), (1, 2, 3), (64, 64))
    explained = explanations(world.facts(on_error=on_error), "data/bad.png")
    assert [each.reason for each in explained] == ["new", ""]
