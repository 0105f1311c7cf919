"""A plan of what changed is the plan of everything, and only what changed is judged again."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import latentmake
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from latentmake.base import atomic
from latentmake.base.errors import UserError
from latentmake.config.root import parse
from latentmake.data.memo import Memo
from latentmake.encode.reading import Loaded, Sample
from latentmake.layouts.names import plain_latents_metadata
from latentmake.plan.facts import Facts
from latentmake.plan.judge import Judge, State
from latentmake.plan.planner import make_plan
from latentmake.plan.remembered import Remembered
from latentmake.plan.run_plan import Plan, RunPlan
from order_world import carry_out
from PIL import Image

EMPTY = (2).to_bytes(8, "little") + b"{}"  # a safetensors file without tensors
STEMS = ("a", "b", "b.c", "ab", "sub/a", "sub/d")
PLAIN: dict[str, Any] = {
    "datasets": {"cats": {"path": "data"}},
    "models": {"tiny": {"vae": "models/vae", "text": "models/text_encoder"}},
    "runs": {"cats": {"datasets": "cats", "model": "tiny", "resolutions": [64, 96]}},
}
VARIANTS: dict[str, Any] = {
    **PLAIN,
    "datasets": {
        "cats": {
            "path": "data",
            "captions": {"variants": 2, "shuffle_caption": True},
            "tags_extension": ".tags",
        }
    },
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
            (place / "model.safetensors").write_bytes(EMPTY)
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

    def plan(self, memo: Memo) -> Plan:
        return make_plan(Facts(parse(self.values), memo), ["cats"])

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
            plain_latents_metadata(1.0, 0.0, sample.original, (8, 8)) if sample.shape else {},
        )
        for sample in samples
    ]


def seen(world: World, memo: Memo) -> object:
    """Return all that a plan says, besides where a stale target might be taken from."""
    try:
        plan = world.plan(memo).runs["cats"]
    except UserError as error:
        return str(error)
    states = {part.name: _state(plan, part) for part in plan.parts}
    return states, plan.images, plan.faults, plan.warnings


def _state(plan: RunPlan, part: Any) -> object:
    state = plan.parts[part]
    stale = {each.path: each.found for each in state.to_make}
    return state.fresh, stale, state.keys, sorted(state.orphans), state.keys_by_name()


def _edit_image(world: World, stem: str) -> None:
    world.image(stem)


def _edit_caption(world: World, stem: str) -> None:
    world.caption(stem)


def _tags(world: World, stem: str) -> None:
    world.caption(stem, "tags")


def _empty(world: World, stem: str) -> None:
    world.caption(stem)
    Path("data", f"{stem}.txt").write_text("")


def _older(world: World, stem: str) -> None:
    """Edit a caption; its length and mtime stay."""
    path = Path("data", f"{stem}.txt")
    if path.exists():
        stat = path.stat()
        path.write_text(path.read_text()[::-1])
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def _touch(world: World, stem: str) -> None:
    for path in Path("data").rglob("*"):
        os.utime(path)


def _remove(world: World, stem: str) -> None:
    for ending in ("png", "txt", "tags"):
        Path("data", f"{stem}.{ending}").unlink(missing_ok=True)


def _rename(world: World, stem: str) -> None:
    for ending in ("png", "txt"):
        path = Path("data", f"{stem}.{ending}")
        if path.exists():
            path.rename(path.with_stem(f"{path.stem}2"))


def _upper(world: World, stem: str) -> None:
    path = Path("data", f"{stem}.txt")
    if path.exists():
        path.rename(path.with_suffix(".TXT"))


def _folder(world: World, stem: str) -> None:
    Path("data", f"{stem}.png.png").mkdir(parents=True, exist_ok=True)
    Path("data", f"{stem}.png.png/x.png").write_bytes(b"x")


def _mask(world: World, stem: str) -> None:
    world.image(f"{stem}-masklabel")
    world.image(f"masks/{stem}")


def _unread(world: World, stem: str) -> None:
    for ending in ("mp4", "heic"):
        world.caption(stem, ending)


def _lose(world: World, stem: str) -> None:
    for path in world.caches()[:: 1 + len(stem)]:
        path.unlink()


def _swap(world: World, stem: str) -> None:
    if len(caches := world.caches()) > 1:
        atomic.write(caches[0], caches[-1].read_bytes())


def _damage(world: World, stem: str) -> None:
    for path in world.caches()[:1]:
        path.write_bytes(b"damaged")


def _stray(world: World, stem: str) -> None:
    for path in world.caches()[:1]:
        atomic.write(path.with_name(f"stranger{path.name}"), path.read_bytes())
        path.with_name(f".1{atomic.TEMPORARY_SUFFIX}").write_bytes(b"")
        path.with_name("notes.txt").write_bytes(b"")


EDITS: list[Callable[[World, str], None]] = [
    _edit_image, _edit_caption, _tags, _empty, _older, _touch, World.add, _remove, _rename,
    _upper, _folder, _mask, _unread, _lose, _swap, _damage, _stray,
]  # fmt: skip
STEPS = st.lists(
    st.tuples(st.sampled_from([*EDITS, World.build]), st.sampled_from(STEMS)),
    min_size=1,
    max_size=6,
)


@given(steps=STEPS, values=st.sampled_from([PLAIN, VARIANTS]))
@settings(max_examples=25, deadline=None)
def test_a_plan_of_changes_equals_a_plan_from_an_empty_memo(
    steps: list[tuple[Any, str]], values: dict[str, Any]
) -> None:
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as place, Memo(Path(place, "memo.sqlite")) as memo:
        os.chdir(place)
        try:
            world = World(values)
            world.build(memo)
            assert seen(world, memo) == seen(world, Memo(None))
            for step, stem in steps:
                if step is World.build:
                    try:
                        world.build(memo)
                    except UserError:
                        continue
                else:
                    step(world, stem)
                assert seen(world, memo) == seen(world, Memo(None))
        finally:
            os.chdir(before)


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
        world.plan(memo)
    return found


@pytest.mark.parametrize("edit", [_edit_image, _edit_caption, _remove, World.add, _touch])
def test_only_items_of_changed_files_are_judged_again(
    built: tuple[World, Memo], monkeypatch: pytest.MonkeyPatch, edit: Callable[[World, str], None]
) -> None:
    world, memo = built
    assert judged(world, memo, monkeypatch) == set()
    edit(world, "b.c")
    expected = {*STEMS[:4]} if edit is _touch else {"b", "b.c"}
    assert judged(world, memo, monkeypatch) <= expected
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


def test_lines_of_a_replaced_state_are_not_those_of_another(built: tuple[World, Memo]) -> None:
    """A plan beside another one must not mistake missing lines for missing targets."""
    world, memo = built
    facts = Facts(parse(world.values), memo)
    read, unread = (Remembered(facts, "cats", "tiny", ["64", "96", "text"]) for _ in range(2))
    state, lines = read.state(), read.lines("text")
    assert state is not None
    assert {*lines} == {*STEMS[:4]}
    read.keep(state, dict.fromkeys(lines, ""))
    assert unread.lines("text") == {}
    assert Remembered(facts, "cats", "tiny", ["64", "96", "text"]).lines("text") == lines


@pytest.mark.parametrize("damage", ["x'00'", "x''", "substr(value, 1, 70)", "value || x'00'"])
def test_a_damaged_state_is_judged_anew(built: tuple[World, Memo], damage: str) -> None:
    world, memo = built
    memo.save()
    expected = seen(world, Memo(None))
    memo.database.execute(f"UPDATE facts SET value = CAST({damage} AS BLOB) WHERE kind = 14")
    assert seen(world, memo) == expected
