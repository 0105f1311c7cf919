"""A plan of what changed is the plan of everything."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from latentmake.caches.encode import carry_out
from latentmake.caches.encoders import Loaded
from latentmake.caches.inputs import Sample
from latentmake.config.root import parse
from latentmake.errors import UserError
from latentmake.files import atomic
from latentmake.index.memo import Memo
from latentmake.layouts import plain
from latentmake.plan.facts import Facts
from latentmake.plan.planner import make_plan
from latentmake.plan.run_plan import Plan, RunPlan
from PIL import Image

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

    def plan(self, memo: Memo) -> Plan:
        return make_plan(Facts(parse(self.values), memo), ["cats"])

    def build(self, memo: Memo) -> None:
        for order in self.plan(memo).orders:
            carry_out(order, order.receipt, say=lambda _: None, encoder=Loaded(nothing, 1))

    def caches(self) -> list[Path]:
        return sorted(path for path in Path("cache").rglob("*") if path.is_file())


def nothing(samples: list[Sample]) -> list[tuple[dict[str, torch.Tensor], dict[str, str]]]:
    """Stand for an encoder."""
    return [
        (
            {"latents": torch.ones(4, 8, 8)},
            plain.latents_metadata(1.0, 0.0, sample.original, (8, 8)) if sample.shape else {},
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
    stale = {each.path: each.found for each in state.stale}
    return state.fresh, stale, state.keys, sorted(state.orphans), state.known()


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
    _upper, _folder, _lose, _swap, _damage, _stray,
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
