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


FILE = {
    "architecture": "sdxl",
    "checkpoint": "model.safetensors",
    "text": {"tokenizer": "pipe/tokenizer"},
}


class Project:
    def __init__(self, layout: str, **model: Any) -> None:
        run = {"datasets": ["cats"], "model": "xl", "resolutions": [64], "trainer": None}
        self.values = {
            "datasets": {"cats": {"path": "data"}},
            "models": {"xl": {"layout": layout, **model}},
            "runs": {"r": run},
        }

    def plan(self) -> tuple[Facts, Plan]:
        facts = Facts(parse(self.values), Memo(Path(".latentmake/memo.sqlite")))
        return facts, make_plan(facts, ["r"])

    def orders(self) -> list[Order]:
        return [order for order in self.plan()[1].orders if order.kind == "text"]

    def texts(self) -> list[str]:
        """Return the names of stale texts."""
        return sorted(Path(x).name[0] for order in self.orders() for x in order.paths)

    def build(self, *, as_before: bool = False) -> None:
        for order in self.plan()[1].orders:
            if as_before and order.kind == "text":
                order = replace(order, recipe=before_readings(order.recipe)[0])
            carry_out(order)


@pytest.fixture(autouse=True)
def _files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, micro: Path) -> None:
    monkeypatch.chdir(tmp_path)
    checkpoint_world.write(Path("pipe"), Path("model.safetensors"), micro / "tokenizer", "sdxl")
    for number, (stem, caption) in enumerate(CAPTIONS.items()):
        world.draw(Path(f"data/{stem}.png"), number, (64, 64))
        Path(f"data/{stem}.txt").write_text(caption)


@pytest.mark.parametrize(
    ("layout", "model", "words"),
    [("sdscripts", FOLDERS, "as text"), ("plain", FILE, "as padding")],
    ids=["sdscripts, from a folder", "plain, from a single file"],
)
def test_only_texts_with_the_token_of_padding_are_stale(
    layout: str, model: dict[str, Any], words: str
) -> None:
    project = Project(layout, **model)
    project.build(as_before=True)
    assert project.texts() == ["b"]
    facts, plan = project.plan()
    why = f"recipe: text encoder 2's reading of ! absent -> {words}: 1 text of cats"
    assert [*recipe_changes(facts, [*plan.runs.values()])] == [why]
    project.build()
    assert project.texts() == []
    Path("data/a.txt").write_text("a blue circle")
    parts = project.plan()[1].runs["r"].parts.values()
    (work,) = (each for part in parts for each in part.stale)
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
