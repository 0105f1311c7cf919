"""Content decides what is stale: exactly the targets of an edit, with the right reason."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from item_world import inputs_of, plain_path
from latentmake.base import atomic, digest
from latentmake.base.digest import source_stat
from latentmake.base.errors import CacheError
from latentmake.config.datasets import Dataset
from latentmake.data.item import Item
from latentmake.data.memo import Folder, Memo
from latentmake.formats import cachefile
from latentmake.geometry.buckets import Size
from latentmake.layouts.layout import layout_of, resolution_of
from latentmake.layouts.names import plain_latents_metadata
from latentmake.plan.facts import UNKNOWN
from latentmake.plan.judge import Contents, Judge, State
from latentmake.plan.manifest import keys_digest
from safetensors.torch import save_file

RECIPES: dict[str, dict[str, object]] = {
    "64": {"dtype": "a", "exif_rotation": True},
    "96": {"dtype": "a", "exif_rotation": True},
    "text": {"t": 1},
}

SETTINGS = Dataset(path="data")
STEMS = ("a", "b", "sub/c")


@dataclass
class World:
    """A dataset `cats` of images and captions, and the caches of a model `tiny`, below a folder."""

    root: Path
    recipes: dict[str, dict[str, object]] = field(default_factory=lambda: dict(RECIPES))
    memo_place: Path | None = None

    def source(self, stem: str, part: str) -> Path:
        return self.root / "data" / f"{stem}{'.txt' if part == 'text' else '.png'}"

    def target(self, stem: str, part: str) -> Path:
        return self.root / plain_path("cats", "tiny", part, stem)

    def put(self, stem: str, part: str, content: bytes) -> None:
        path = self.source(stem, part)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)

    def filled(self, stems: Sequence[str]) -> World:
        for stem in stems:
            self.put(stem, "64", f"image {stem}".encode())
            self.put(stem, "text", f"caption {stem}".encode())
        return self

    def stems(self) -> list[str]:
        found = (self.root / "data").rglob("*.png")
        return sorted(str(path.relative_to(self.root / "data"))[:-4] for path in found)

    def make(self, stem: str, part: str) -> None:
        """Write a target as a job would."""
        source = digest.of_file(self.source(stem, part))
        size = resolution_of(part)
        variant = layout_of("plain").view(Size(80, 60), size, SETTINGS)[0] if size else ""
        recipe = self.recipes[part]
        key = cachefile.target_key(source, digest.of_value(recipe), variant)
        stamp = cachefile.stamp(key=key, source=source, recipe=recipe)
        said = {} if part == "text" else plain_latents_metadata(1.0, 0.0, (80, 60), (64, 64))
        data = cachefile.serialize({"x": torch.ones(2)}, said | stamp)
        atomic.write(self.target(stem, part), data)

    def make_all(self) -> None:
        for stem in self.stems():
            for part in self.recipes:
                self.make(stem, part)

    def judge(
        self, *, owned: set[str] | None = None, parts: tuple[str, ...] = ("64", "96", "text")
    ) -> State:
        """Return the state of some parts, of all images and captions."""
        before = Path.cwd()
        os.chdir(self.root)
        try:
            inputs = {part: [self.item(stem, part) for stem in self.stems()] for part in parts}
            with Memo(self.memo_place) as memo:
                found = Folder("cache/cats/tiny").listing()
                owners = set(self.stems()) if owned is None else owned
                return self.judge_with(memo).judge(inputs, owners, found)
        finally:
            os.chdir(before)

    def item(self, stem: str, part: str) -> Item:
        """Return the inputs of a target."""
        source = self.source(stem, part)
        return inputs_of(stem, str(source), stat=source_stat(source.stat()))

    def judge_with(self, memo: Memo) -> Judge:
        return judge_of(
            memo,
            ("cats", "tiny"),
            {
                part: digest.of_value(values) if values else UNKNOWN
                for part, values in self.recipes.items()
            },
            settings=SETTINGS,
            items=[self.item(stem, part) for stem in self.stems() for part in ("64", "text")],
        )


def judge_of(
    memo: Memo,
    place: tuple[str, str],
    recipes: dict[str, str],
    *,
    settings: Dataset | None = None,
    items: Sequence[Item] = (),
) -> Judge:
    config = SimpleNamespace(datasets={place[0]: settings})
    facts: Any = SimpleNamespace(
        memo=memo,
        config=config,
        layout=lambda _: layout_of("plain"),
        forced_of=lambda *_: set(),
        recipe=lambda *_: {},
        recipe_digest=lambda *_: "",
    )
    judge = Judge(facts, *place, [], [])
    judge.recipes, judge.contents = (
        recipes,
        Contents([file for item in items for file in item.files], memo, settings),
    )
    return judge


def reasons(found: State) -> dict[tuple[str, str], str]:
    return {
        (work.item.stem, part): target.reason
        for part, state in found.parts.items()
        for work in state.stale
        for target in work.targets
    }


def orphans(found: State) -> list[str]:
    return sorted(path for state in found.parts.values() for path in state.orphans)


@pytest.fixture(params=["with a memo", "without one"])
def world(tmp_path: Path, request: pytest.FixtureRequest) -> World:
    place = tmp_path / "memo.sqlite" if request.param == "with a memo" else None
    return World(tmp_path, memo_place=place).filled(STEMS)


def test_what_was_just_made_is_fresh(world: World) -> None:
    world.make_all()
    for _ in range(2):
        found = world.judge()
        assert reasons(found) == {} and orphans(found) == []
        for part, state in found.parts.items():
            keys = [(x, cachefile.read_header(world.target(x, part)).key) for x in STEMS]
            assert state.fresh == 3 and [*state.keys_by_name().items()] == keys
            assert state.keys == keys_digest(keys)


def _undo(world: World) -> None:
    world.put("a", "64", b"another image")
    world.judge()
    world.put("a", "64", b"image a")


def _under_an_older_mtime(world: World) -> None:
    source = world.source("a", "64")
    source.write_bytes(b"x" * source.stat().st_size)
    os.utime(source, (1, 1))


def _in_the_place(world: World, make: Callable[[Path], object]) -> None:
    path = world.target("a", "64")
    path.unlink()
    make(path)


EDITED = {("a", "64"): "edited", ("a", "96"): "edited"}
DAMAGED = {("a", "64"): "damaged"}
CHANGES: dict[str, tuple[Callable[[World], object], dict[tuple[str, str], str]]] = {
    "an image": (lambda world: world.put("a", "64", b"another image"), EDITED),
    "an image under an older mtime": (_under_an_older_mtime, EDITED),
    "an image and back": (_undo, {}),
    "a recipe": (
        lambda world: world.recipes.update({"96": {"dtype": "b"}}),
        {(stem, "96"): "changed recipe" for stem in STEMS},
    ),
    "a model yet to be made": (
        lambda world: world.recipes.update(text={}),
        {(stem, "text"): "changed recipe" for stem in STEMS},
    ),
    "a file of others": (
        lambda world: save_file({"x": torch.ones(1)}, world.target("b", "text")),
        {("b", "text"): "damaged"},
    ),
    "a link to nowhere": (partial(_in_the_place, make=lambda x: x.symlink_to("gone")), DAMAGED),
    "a link to itself": (partial(_in_the_place, make=lambda x: x.symlink_to(x.name)), DAMAGED),
    "a pipe": (partial(_in_the_place, make=os.mkfifo), DAMAGED),
}


@pytest.mark.parametrize(("change", "expected"), CHANGES.values(), ids=CHANGES)
def test_a_change_makes_exactly_its_targets_stale_for_its_reason(
    world: World, change: Callable[[World], object], expected: dict[tuple[str, str], str]
) -> None:
    world.make_all()
    world.judge()
    stat = world.target("a", "64").stat()
    key = cachefile.read_header(world.target("a", "64")).key
    change(world)
    found = world.judge()
    assert reasons(found) == expected and orphans(found) == []
    if expected == EDITED:
        (stale,) = found.parts["64"].to_make
        assert stale.found == f"{key}@{stat.st_mtime_ns}" and found.parts["text"].keys is not None


@pytest.mark.parametrize("change", ["recipe", "caption"])
@pytest.mark.parametrize("how", ["damaged", "unreadable"])
def test_a_target_damaged_under_its_old_stat_is_replaced(
    world: World, monkeypatch: pytest.MonkeyPatch, change: str, how: str
) -> None:
    world.make_all()
    world.judge()
    path = world.target("b", "text")
    stat = path.stat()
    if how == "damaged":
        path.write_bytes(bytes(stat.st_size))
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    else:
        failing = partial(_fail_for, path, cachefile.read_head)
        monkeypatch.setattr(cachefile, "read_head", failing)
    if change == "recipe":
        world.recipes["text"] = {"t": 2}
    else:
        world.put("b", "text", b"another caption")
    found = world.judge()
    assert reasons(found)["b", "text"] == "damaged"
    ((_, (stale,), _),) = (each for each in found.parts["text"].stale if each.item.stem == "b")
    assert stale.found == f"damaged@{stat.st_mtime_ns}"


def _fail_for(bad: Path, read: Callable[[Path], object], path: Path) -> object:
    """Read a file as a disk with a bad sector does."""
    if Path(path).samefile(bad):
        raise OSError(errno.EIO, "Input/output error")
    return read(path)


def test_a_caption_in_no_file_is_known_by_its_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = digest.of_value(RECIPES["text"])
    key = cachefile.target_key(digest.of_bytes(b"hello"), recipe, "")
    stamp = cachefile.stamp(key=key, source="s", recipe=RECIPES["text"])
    path = plain_path("_prompts", "tiny", "text", "p")
    atomic.write(Path(path), cachefile.serialize({"x": torch.ones(1)}, stamp))
    for text, expected in (("hello", {}), ("goodbye", {("p", "text"): "edited"})):
        judge = judge_of(Memo(None), ("_prompts", "tiny"), {"text": recipe})
        found = judge.judge(
            {"text": [inputs_of("p", None, text)]}, {"p"}, Folder("cache/_prompts/tiny").listing()
        )
        assert reasons(found) == expected


def test_a_source_that_cannot_be_read_is_named_only_where_it_matters(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.make_all()
    monkeypatch.chdir(world.root)
    gone = inputs_of("a", "data/gone.png", stat=source_stat(world.source("a", "64").stat()))
    found = world.judge_with(Memo(None)).judge({"64": [gone]}, {"a"}, {})
    assert reasons(found) == {("a", "64"): "new"}
    there = Folder("cache/cats/tiny").listing()
    found = world.judge_with(Memo(None)).judge({"64": [gone]}, {"a"}, there)
    assert found.unreadable["a"].line.startswith("data/gone.png: cannot be read")
    assert reasons(found) == {}
    assert found.parts["64"].fresh == 0


@pytest.mark.parametrize("gone", STEMS)
def test_orphans_are_of_all_parts_and_of_no_item_that_is_only_faulty(
    world: World, gone: str
) -> None:
    world.make_all()
    world.source(gone, "64").unlink()
    assert orphans(world.judge(owned={*STEMS})) == []
    found = world.judge(parts=("64",))
    assert orphans(found) == sorted(plain_path("cats", "tiny", part, gone) for part in RECIPES)


def test_a_half_written_file_is_an_orphan_and_a_file_of_others_is_none(world: World) -> None:
    world.make_all()
    folder = world.target("a", "64").parent
    save_file({"x": torch.ones(1)}, folder / "theirs.latents.safetensors")
    for path in (folder / "empty.latents.safetensors", folder / "notes.md"):
        path.touch()
    (folder.parent / "notes.latents.safetensors").write_text("mine")
    left = world.target("sub/c", "64").parent / f".x{atomic.TEMPORARY_SUFFIX}"
    left.write_bytes(b"half")
    assert orphans(world.judge()) == [str(left.relative_to(world.root))]


@pytest.mark.parametrize(
    ("place", "make", "what"),
    [
        ("cats/tiny/64", Path.touch, "is a file, where a folder belongs"),
        ("cats/tiny", Path.touch, "is a file, where a folder belongs"),
        ("cats/tiny/64/sub", Path.touch, "is a file, where a folder belongs"),
        ("cats/tiny/64", lambda path: path.symlink_to("64"), "is a link that leads nowhere"),
        ("cats/tiny/64", lambda path: path.symlink_to("96"), "is a link that leads nowhere, or"),
    ],
)
def test_what_lies_in_the_place_of_a_cache_is_named_in_a_line(
    world: World, place: str, make: Callable[[Path], object], what: str
) -> None:
    world.make_all()
    path = world.root / "cache" / place
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    make(path)
    with pytest.raises(CacheError, match=rf"^cache/{place}: {what}.*; move it away or remove it$"):
        world.judge()


MORE = ("a", "b", "c/d", "c/e")
EDITS = (
    "image", "caption", "touch", "same", "cut", "delete", "swap", "remove", "add",
)  # fmt: skip


def edit(world: World, kind: str, stem: str) -> set[str]:
    """Edit an item; return the parts that become stale."""
    image, caption, text = (world.source(stem, "64"), world.source(stem, "text"), "text")
    match kind:
        case "image":
            image.write_bytes(image.read_bytes() + b"edit")
            return {"64", "96"}
        case "caption":
            caption.write_bytes(caption.read_bytes() + b"edit")
            return {text}
        case "touch":
            os.utime(image)
            os.utime(caption, (1, 1))
        case "same":
            for path in (image, *(world.target(stem, part) for part in RECIPES)):
                if path.exists():
                    atomic.write(path, path.read_bytes())
        case "cut" if (target := world.target(stem, "96")).exists():
            os.truncate(target, target.stat().st_size // 2)
            return {"96"}
        case "delete":
            world.target(stem, text).unlink(missing_ok=True)
            return {text}
        case "swap":
            atomic.write(world.target(stem, text), b"nothing")
            return {text}
        case "remove":
            image.unlink()
            caption.unlink()
    return set()


@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(EDITS), st.sampled_from(MORE)), max_size=6), st.booleans()
)
def test_after_any_edits_exactly_their_targets_are_stale(
    edits: list[tuple[str, str]], remembering: bool
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        memo = Path(folder) / "memo.sqlite" if remembering else None
        world = World(Path(folder), memo_place=memo).filled(MORE)
        world.make_all()
        assert reasons(world.judge()) == {}
        stale: set[tuple[str, str]] = set()
        for number, (kind, stem) in enumerate(edits):
            if kind == "add":
                world.filled([f"new{number}"])
                stale |= {(f"new{number}", part) for part in RECIPES}
            elif stem in world.stems():
                stale |= {(stem, part) for part in edit(world, kind, stem)}
        stale = {(stem, part) for stem, part in stale if stem in world.stems()}
        found = world.judge()
        assert set(reasons(found)) == stale
        gone = {path.split("tiny/")[1].split("/", 1)[1].split(".")[0] for path in orphans(found)}
        assert gone <= {*MORE} - {*world.stems()}
        for stem, part in stale:
            world.make(stem, part)
        assert reasons(world.judge()) == {}
