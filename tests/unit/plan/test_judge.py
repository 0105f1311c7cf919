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
    world = World(tmp_path, memo_place=place)
    for stem in ("a", "b", "sub/c"):
        world.put(stem, "64", f"image {stem}".encode())
        world.put(stem, "text", f"caption {stem}".encode())
    return world


def test_what_was_just_made_is_fresh(world: World) -> None:
    world.make_all()
    for _ in range(2):
        found = world.judge()
        assert reasons(found) == {}
        assert orphans(found) == []
        for part, state in found.parts.items():
            assert state.fresh == 3
            stems = ["a", "b", "sub/c"]
            keys = [cachefile.read_header(world.target(stem, part)).key for stem in stems]
            assert [*state.keys_by_name().items()] == [*zip(stems, keys, strict=True)]
            assert state.keys == keys_digest(zip(stems, keys, strict=True))


def test_an_edited_image_makes_its_latents_stale_and_nothing_else(world: World) -> None:
    world.make_all()
    world.judge()
    world.put("a", "64", b"another image")
    found = world.judge()
    assert reasons(found) == {("a", "64"): "edited", ("a", "96"): "edited"}
    assert found.parts["text"].keys is not None
    (stale,) = found.parts["64"].to_make
    stat = world.target("a", "64").stat()
    key = cachefile.read_header(world.target("a", "64")).key
    assert stale.found == f"{key}@{stat.st_mtime_ns}"


def test_an_edit_under_an_older_mtime_is_noticed(world: World) -> None:
    world.make_all()
    world.judge()
    size = world.source("a", "64").stat().st_size
    world.put("a", "64", b"x" * size)
    os.utime(world.source("a", "64"), (1, 1))
    assert set(reasons(world.judge())) == {("a", "64"), ("a", "96")}


def test_undoing_an_edit_makes_everything_fresh_again(world: World) -> None:
    world.make_all()
    world.put("a", "64", b"another image")
    world.judge()
    world.put("a", "64", b"image a")
    assert reasons(world.judge()) == {}


def test_another_recipe_makes_its_own_part_stale(world: World) -> None:
    world.make_all()
    world.recipes["96"] = {"dtype": "b"}
    expected = {(stem, "96"): "changed recipe" for stem in ("a", "b", "sub/c")}
    assert reasons(world.judge()) == expected


def test_a_model_yet_to_be_made_makes_what_it_shapes_stale(world: World) -> None:
    world.make_all()
    world.recipes["text"] = {}
    expected = {(stem, "text"): "changed recipe" for stem in ("a", "b", "sub/c")}
    assert reasons(world.judge()) == expected


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


def test_a_target_of_others_under_our_name_is_damaged(world: World) -> None:
    world.make_all()
    save_file({"x": torch.ones(1)}, world.target("b", "text"))
    assert reasons(world.judge()) == {("b", "text"): "damaged"}


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


# -- orphans --------------------------------------------------------------------------------------


def test_caches_of_a_faulty_item_are_no_orphans(world: World) -> None:
    world.make_all()
    world.source("a", "64").unlink()
    assert orphans(world.judge(owned={"a", "b", "sub/c"})) == []


@pytest.mark.parametrize("gone", ["a", "b", "sub/c"])
def test_orphans_of_parts_that_no_run_asks_for_are_found_too_and_no_others(
    world: World, gone: str
) -> None:
    world.make_all()
    world.source(gone, "64").unlink()
    found = world.judge(parts=("64",))
    assert orphans(found) == sorted(plain_path("cats", "tiny", part, gone) for part in RECIPES)


def test_files_that_are_not_ours_are_no_orphans(world: World) -> None:
    world.make_all()
    folder = world.target("a", "64").parent
    save_file({"x": torch.ones(1)}, folder / "theirs.latents.safetensors")
    (folder / "empty.latents.safetensors").touch()
    (folder / "notes.md").write_text("mine")
    (folder.parent / "notes.latents.safetensors").write_text("mine")
    assert orphans(world.judge()) == []


def test_what_a_killed_job_left_half_written_is_an_orphan(world: World) -> None:
    world.make_all()
    left = world.target("sub/c", "64").parent / f".x{atomic.TEMPORARY_SUFFIX}"
    left.write_bytes(b"half")
    assert orphans(world.judge()) == [str(left.relative_to(world.root))]


# -- odd things in the cache folder ---------------------------------------------------------------


@pytest.mark.parametrize("to", ["gone", "a.latents.safetensors", "pipe"])
def test_a_pipe_or_a_link_that_leads_to_no_file_is_damaged(world: World, to: str) -> None:
    world.make_all()
    path = world.target("a", "64")
    path.unlink()
    if to == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(to)
    found = world.judge()
    assert reasons(found) == {("a", "64"): "damaged"}
    assert orphans(found) == []


@pytest.mark.parametrize(
    ("place", "make", "what"),
    [
        ("cats/tiny/64", Path.touch, "is a file, where a folder belongs"),
        ("cats/tiny", Path.touch, "is a file, where a folder belongs"),
        ("cats/tiny/64/sub", Path.touch, "is a file, where a folder belongs"),
        ("cats/tiny/64", lambda path: path.symlink_to("64"), "is a link that leads nowhere"),
        (
            "cats/tiny/64",
            lambda path: path.symlink_to("96"),
            "is a link that leads nowhere, or",
        ),
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


# -- any set of edits -----------------------------------------------------------------------------

STEMS = ("a", "b", "c/d", "c/e")
EDITS = (
    "image", "caption", "touch", "same", "cut", "delete", "swap", "foreign", "remove", "add",
)  # fmt: skip


@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(EDITS), st.sampled_from(STEMS)), max_size=6), st.booleans()
)
def test_after_any_edits_exactly_their_targets_are_stale(
    edits: list[tuple[str, str]], remembering: bool
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        memo = Path(folder) / "memo.sqlite" if remembering else None
        world = World(Path(folder), memo_place=memo)
        for stem in STEMS:
            world.put(stem, "64", f"image {stem}".encode())
            world.put(stem, "text", f"caption {stem}".encode())
        world.make_all()
        assert reasons(world.judge()) == {}
        stale: set[tuple[str, str]] = set()
        stems = set(STEMS)
        for number, (edit, stem) in enumerate(edits):
            if stem not in stems and edit != "add":
                continue
            image, caption = world.source(stem, "64"), world.source(stem, "text")
            if edit == "image":
                world.put(stem, "64", f"edit {number}".encode())
                stale |= {(stem, "64"), (stem, "96")}
            elif edit == "caption":
                world.put(stem, "text", f"edit {number}".encode())
                stale.add((stem, "text"))
            elif edit == "touch":
                os.utime(image)
                os.utime(caption, (1, 1))
            elif edit == "same":
                image.write_bytes(image.read_bytes())
                for part in RECIPES:
                    target = world.target(stem, part)
                    if target.exists():
                        atomic.write(target, target.read_bytes())
            elif edit == "cut" and (target := world.target(stem, "96")).exists():
                os.truncate(target, target.stat().st_size // 2)
                stale.add((stem, "96"))
            elif edit == "delete":
                world.target(stem, "text").unlink(missing_ok=True)
                stale.add((stem, "text"))
            elif edit == "foreign":
                save_file({"x": torch.ones(1)}, world.target(stem, "64"))
                stale.add((stem, "64"))
            elif edit == "swap":
                atomic.write(world.target(stem, "text"), b"nothing")
                stale.add((stem, "text"))
            elif edit == "remove":
                image.unlink()
                caption.unlink()
                stems.discard(stem)
                stale = {(other, part) for other, part in stale if other != stem}
            elif edit == "add":
                new = f"new{number}"
                stems.add(new)
                world.put(new, "64", b"image")
                world.put(new, "text", b"caption")
                stale |= {(new, part) for part in RECIPES}
        found = world.judge()
        assert set(reasons(found)) == stale
        gone = {path.split("tiny/")[1].split("/", 1)[1].split(".")[0] for path in orphans(found)}
        assert gone <= set(STEMS) - stems
        for stem, part in stale:
            world.make(stem, part)
        assert reasons(world.judge()) == {}
