"""Texts that earlier releases read otherwise are stale, and no others."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import checkpoint_world
import pytest
import world
from latentmake.config.root import parse
from latentmake.data.memo import Memo
from latentmake.models.cache_recipe import before_readings
from latentmake.pages.explanation import recipe_changes
from latentmake.plan.facts import Facts
from latentmake.plan.orders import Order
from latentmake.plan.planner import Plan, make_plan
from order_world import carry_out

CAPTIONS = {"a": "a red circle", "b": "a red circle!", "c": "<|endoftext|> two"}
SDXL = {"architecture": "sdxl", "vae": "pipe/vae"}
FOLDERS = {**SDXL, "text": ["pipe/text_encoder", "pipe/text_encoder_2"]}


class Project:
    def __init__(self, layout: str, **model: Any) -> None:
        self.values = {
            "datasets": {"cats": {"path": "data"}},
            "models": {"xl": {"layout": layout, **model}},
            "runs": {
                "r": {"datasets": ["cats"], "model": "xl", "resolutions": [64], "trainer": None}
            },
        }

    def facts(self) -> Facts:
        return Facts(parse(self.values), Memo(Path(".latentmake/memo.sqlite")))

    def plan(self) -> Plan:
        return make_plan(self.facts(), ["r"])

    def texts(self) -> list[str]:
        """Return the names of stale texts."""
        return sorted(Path(x).name[0] for order in self.orders() for x in order.paths)

    def orders(self) -> list[Order]:
        return [order for order in self.plan().orders if order.kind == "text"]

    def build(self, *, as_before: bool = False) -> None:
        for order in self.plan().orders:
            if as_before and order.kind == "text":
                order = replace(order, recipe=before_readings(order.recipe)[0])
            carry_out(order)

    def changes(self) -> list[str]:
        facts = self.facts()
        return [*recipe_changes(facts, [*make_plan(facts, ["r"]).runs.values()])]


@pytest.fixture(autouse=True)
def _files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, micro: Path) -> None:
    monkeypatch.chdir(tmp_path)
    checkpoint_world.write(Path("pipe"), Path("model.safetensors"), micro / "tokenizer", "sdxl")
    for number, (stem, caption) in enumerate(CAPTIONS.items()):
        world.draw(Path(f"data/{stem}.png"), number, (64, 64))
        Path(f"data/{stem}.txt").write_text(caption)


@pytest.mark.parametrize(
    ("layout", "model", "words"),
    [
        ("sdscripts", FOLDERS, "as text"),
        (
            "plain",
            {"architecture": "sdxl", "checkpoint": "model.safetensors"},
            "as padding",
        ),
    ],
    ids=["sdscripts, from a folder", "plain, from a single file"],
)
def test_only_texts_with_the_token_of_padding_are_stale(
    layout: str, model: dict[str, Any], words: str
) -> None:
    if "checkpoint" in model:
        model = {**model, "text": {"tokenizer": "pipe/tokenizer"}}
    project = Project(layout, **model)
    project.build(as_before=True)
    assert project.texts() == ["b"]
    why = f"recipe: text encoder 2's reading of ! absent -> {words}: 1 text of cats"
    assert project.changes() == [why]
    project.build()
    assert project.texts() == []
    Path("data/a.txt").write_text("a blue circle")
    (work,) = (each for part in project.plan().runs["r"].parts.values() for each in part.stale)
    assert (work.item.stem, work.targets[0].reason) == ("a", "edited")


def test_texts_that_were_padded_by_another_token_are_stale() -> None:
    project = Project("sdscripts", **FOLDERS)
    both = [
        {"path": f"pipe/{x}", "tokenizer": "pipe/tokenizer"}
        for x in ("text_encoder", "text_encoder_2")
    ]
    project.values["models"]["xl"]["text"] = both
    (order,) = project.orders()
    encoders: Any = order.recipe["encoders"]
    assert [each.get("padding") for each in encoders] == [None, "!"]
