"""A plan by what is remembered is the plan of everything."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import latentmake
import pytest
import torch
from latentmake.caches.inputs import Loaded, Sample
from latentmake.config.root import parse
from latentmake.errors import UserError
from latentmake.files import atomic
from latentmake.index.memo import Memo
from latentmake.layouts import layout
from latentmake.plan.facts import Facts
from latentmake.plan.planner import make_plan
from latentmake.plan.run_plan import Plan, RunPlan
from latentmake.plan.state import Judge, State
from order_world import carry_out
from PIL import Image

STEMS = ("a", "b", "b.c", "ab", "sub/a", "sub/d")
PLAIN: dict[str, Any] = {
    "datasets": {"cats": {"path": "data"}},
    "models": {"tiny": {"vae": "models/vae", "text": "models/text_encoder"}},
    "runs": {"cats": {"datasets": "cats", "model": "tiny", "resolutions": [64, 96]}},
}


class World:
    """A project in the working directory."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.values = values
        self.count = 0
        for part, config in (
            ("vae", {"block_out_channels": [1, 1, 1, 1]}),
            ("text_encoder", {"model_type": "clip_text_model"}),
            ("tokenizer", None),
        ):
            place = Path("models", part)
            place.mkdir(parents=True)
            name = "config.json" if config else "tokenizer.json"
            (place / name).write_text(json.dumps(config))
            (place / "model.safetensors").write_bytes(b"")
        for stem in STEMS[:4]:
            self.add(stem)

    def image(self, stem: str) -> None:
        """Write an image of new content and maybe another size."""
        self.count += 1
        path = Path("data", f"{stem}.png")
        path.parent.mkdir(parents=True, exist_ok=True)
        number = self.count
        size = (80 + 16 * (number % 3), 64)
        Image.new("RGB", size, (number % 256, 0, 0)).save(path)

    def caption(self, stem: str, ending: str = "txt") -> None:
        self.count += 1
        path = Path("data", f"{stem}.{ending}")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"caption {self.count}, cat")

    def add(self, stem: str) -> None:
        self.image(stem)
        self.caption(stem)

    def plan(self, memo: Memo, *, dry: bool = False) -> Plan:
        return make_plan(Facts(parse(self.values), memo), ["cats"], dry=dry)

    def build(self, memo: Memo) -> None:
        for order in self.plan(memo).orders:
            carry_out(order, say=lambda _: None, encoder=Loaded(nothing, 1))

    def caches(self) -> list[Path]:
        return sorted(path for path in Path("cache").rglob("*") if path.is_file())


def nothing(samples: list[Sample]) -> list[tuple[dict[str, torch.Tensor], dict[str, str]]]:
    """Stand for an encoder."""
    return [
        (
            {"latents": torch.ones(4, 8, 8)},
            layout.plain_latents_metadata(1.0, 0.0, sample.original, (8, 8))
            if sample.shape
            else {},
        )
        for sample in samples
    ]


def seen(world: World, memo: Memo) -> object:
    """Return all that a plan says, besides where a stale target might be taken from."""
    try:
        plan = world.plan(memo).runs["cats"]
    except UserError as error:
        return str(error)
    return {part.name: _state(plan, part) for part in plan.parts}, plan.images, plan.faults


def _state(plan: RunPlan, part: Any) -> object:
    state = plan.parts[part]
    stale = {each.path: each.target.found for each in state.stale}
    return state.fresh, stale, state.keys, sorted(state.orphans), state.known()


def _older(world: World, stem: str) -> None:
    """Edit a caption; its length and mtime stay."""
    path = Path("data", f"{stem}.txt")
    stat = path.stat()
    path.write_text(path.read_text()[::-1])
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def _touch(world: World, stem: str) -> None:
    for path in Path("data").rglob("*"):
        os.utime(path)


def _remove(world: World, stem: str) -> None:
    for ending in ("png", "txt"):
        Path("data", f"{stem}.{ending}").unlink()


def _lose(world: World, stem: str) -> None:
    for path in world.caches()[::2]:
        path.unlink()


def _swap(world: World, stem: str) -> None:
    caches = world.caches()
    atomic.write(caches[0], caches[-1].read_bytes())


def _damage(world: World, stem: str) -> None:
    world.caches()[0].write_bytes(b"damaged")


def _stray(world: World, stem: str) -> None:
    path = world.caches()[0]
    atomic.write(path.with_name(f"stranger{path.name}"), path.read_bytes())
    path.with_name(f".1{atomic.TEMPORARY_SUFFIX}").write_bytes(b"")
    path.with_name("notes.txt").write_bytes(b"")


EDITS: list[Callable[[World, str], None]] = [
    World.image, World.caption, World.add, _older, _touch, _remove, _lose, _swap, _damage, _stray,
]  # fmt: skip


@pytest.fixture
def built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[World, Memo]]:
    """A project whose caches are all there and remembered."""
    monkeypatch.chdir(tmp_path)
    with Memo(Path("memo.sqlite")) as memo:
        world = World(PLAIN)
        world.build(memo)
        world.plan(memo)
        yield world, memo


def judged(world: World, memo: Memo, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Return the stems of items that a plan judges."""
    found: set[str] = set()
    judge = Judge.judge

    def noted(self: Judge, inputs: Any, *others: Any) -> State:
        found.update(item.stem for items in inputs.values() for item in items)
        return judge(self, inputs, *others)

    with monkeypatch.context() as patch:
        patch.setattr(Judge, "judge", noted)
        world.plan(memo, dry=True)  # an order of a manifest would list all items
    return found


@pytest.mark.parametrize("edit", EDITS)
def test_a_plan_after_an_edit_is_that_of_an_empty_memo(
    built: tuple[World, Memo], monkeypatch: pytest.MonkeyPatch, edit: Callable[[World, str], None]
) -> None:
    world, memo = built
    assert judged(world, memo, monkeypatch) == set()
    assert seen(world, memo) == seen(world, Memo(None))
    edit(world, "b.c")
    assert judged(world, memo, monkeypatch) >= {"a", "b"}
    assert seen(world, memo) == seen(world, Memo(None))


def test_a_state_is_remembered_again_after_a_build(
    built: tuple[World, Memo], monkeypatch: pytest.MonkeyPatch
) -> None:
    world, memo = built
    world.caption("b.c")
    world.build(memo)
    world.plan(memo)
    assert judged(world, memo, monkeypatch) == set()


def test_nothing_is_remembered_while_orphans_or_most_targets_are_to_do(
    built: tuple[World, Memo], monkeypatch: pytest.MonkeyPatch
) -> None:
    world, memo = built
    _stray(world, "a")
    for _ in range(2):
        parts = world.plan(memo).runs["cats"].parts.values()
        assert len([path for part in parts for path in part.orphans]) == 2
    shutil.rmtree("cache")
    for _ in range(2):
        assert judged(world, memo, monkeypatch) == {*STEMS[:4]}


@pytest.mark.parametrize(("name", "value"), [("__version__", "9.9"), ("PLAN_VERSION", 99)])
def test_no_state_of_other_planning_code_is_believed(
    built: tuple[World, Memo], monkeypatch: pytest.MonkeyPatch, name: str, value: object
) -> None:
    world, memo = built
    monkeypatch.setattr(latentmake, name, value)
    assert judged(world, memo, monkeypatch) == {*STEMS[:4]}
