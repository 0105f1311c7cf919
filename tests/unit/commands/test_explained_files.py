"""A cache file is explained in whatever state it is, and what differs is named by its settings."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import strategies_world
import torch
import world
from item_world import inputs_of
from latentmake.base import atomic, digest
from latentmake.base.errors import UserError
from latentmake.commands import file_origin
from latentmake.commands.file_origin import Explanation, explanations
from latentmake.config.datasets import Dataset
from latentmake.data.item import Item
from latentmake.data.memo import Memo
from latentmake.formats import cachefile
from latentmake.formats.cachefile import read_header, target_key
from latentmake.geometry.buckets import Size
from latentmake.layouts.layout import layout_of
from latentmake.layouts.names import plain_latents_metadata
from latentmake.pages.explanation import placing_differences, recipe_changes
from latentmake.plan import store
from latentmake.plan.facts import Facts
from latentmake.plan.judge import Judge, State
from latentmake.plan.orders import Part, Target, Work, placing_of, view_of
from latentmake.plan.planner import make_plan
from safetensors.torch import save_file

TEXT = "cache/shapes/tiny/text/ant_lumina_te.npz"
LATENTS = "cache/shapes/tiny/128/ant_0300x0080_lumina.npz"
GEMMA = "model.layers.0.post_feedforward_layernorm.weight"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with all caches of a run."""
    folder = tmp_path_factory.mktemp("built")
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(folder)
        strategies_world.make()
        world.draw(Path("data/ant.png"), 0, (300, 80))
        for order in strategies_world.plan(config()).orders:
            strategies_world.encode(order)
    return folder


@pytest.fixture(autouse=True)
def _copied(built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(built, tmp_path / "copy")
    monkeypatch.chdir(tmp_path / "copy")


def config() -> dict[str, Any]:
    return strategies_world.config(resolution=128)


def explained(file: str, values: dict[str, Any] | None = None) -> list[Explanation]:
    return explanations(strategies_world.facts(values or config()), file)


def one(file: str, values: dict[str, Any] | None = None) -> Explanation:
    (found,) = explained(file, values)
    assert next(found.lines()).startswith(f"{file}: {found.state}")
    return found


def test_fresh_files_are_explained_by_image_caption_or_name() -> None:
    for file in ("data/ant.png", "data/ant.txt", str(Path("data/ant.png").absolute())):
        assert [(each.path, each.state) for each in explained(file)] == [
            (LATENTS, "fresh"),
            (TEXT, "fresh"),
        ]
    # By another way to the folder, and where the source lies behind a link.
    Path("link").symlink_to(Path.cwd())
    Path("data").rename("disk")
    Path("data").symlink_to("disk")
    for file in ("disk/ant.png", "link/data/ant.png", f"link/{LATENTS}"):
        assert explained(str(Path(file).absolute()))[0].path == LATENTS, file
    found = one(TEXT)
    assert (found.differences, found.runs, found.source) == ([], ["tiny"], ["data/ant.txt"])
    assert "\n".join(found.lines()).count(" by sd-scripts\n") == 1


def test_another_clip_of_the_item_that_is_missing_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    judged = file_origin.judged

    def with_another_clip(facts: Facts, part: Part, items: list[Item], paths: list[str]) -> State:
        state = judged(facts, part, items, paths)
        state.parts[part.name].stale.insert(0, Work(items[0], (Target(part.name, "clip"),)))
        return state

    monkeypatch.setattr(file_origin, "judged", with_another_clip)
    assert one(LATENTS).state == "fresh"


def test_all_parts_of_a_key_that_differ_are_named() -> None:
    Path("data/ant.txt").write_text("a queen")
    save_file({GEMMA: torch.zeros(2)}, "models/other.safetensors")
    values = config()
    values["models"]["tiny"] |= {"text": "models/other.safetensors", "text_dtype": "float16"}
    found = one(TEXT, values)
    assert (found.state, found.reason) == ("stale", "changed recipe")
    words = [*map(str, found.differences)]
    assert [each.partition(" ")[0] for each in words] == ["caption's", "text", "dtype"]
    assert words[0].endswith("(data/ant.txt)") and "bfloat16 -> float16" in words[2]
    assert words[1].startswith("text encoder's digest ")
    assert words[1].endswith("(models/other.safetensors)")
    assert one(LATENTS, values).state == "fresh"


def test_a_plan_reads_one_header_of_each_recipe() -> None:
    values = config()
    values["models"]["tiny"]["text_dtype"] = "float16"
    facts = strategies_world.facts(values)
    runs = [*make_plan(facts, ["tiny"]).runs.values()]
    others = sorted(Path(TEXT).parent.iterdir())[1:]
    for each in others:
        each.unlink()
    assert [*recipe_changes(facts, runs)] == [
        f"recipe: dtype bfloat16 -> float16: {1 + len(others)} texts of shapes"
    ]


def test_an_undone_edit_is_at_hand() -> None:
    key = read_header(TEXT).key
    store.put(Path(TEXT), key)
    found = explained("data/ant.txt")[1]
    assert (found.state, found.reason) == ("stale", "new")
    assert found.at_hand == [str(store.stored(key))]
    kept = one(str(store.stored(key)))
    assert kept.state == "unknown" and kept.header is not None and kept.header.key == key


def test_damaged_foreign_and_ownerless_files_are_explained_too() -> None:
    path = Path(TEXT)
    assert "as it was written" in "".join(one(TEXT).lines())
    data = bytearray(path.read_bytes())
    data[data.index(b"\x00\x00\x80?")] ^= 1  # the first 1.0 of an array: no key tells
    path.write_bytes(data)
    found = one(TEXT)
    assert found.state == "fresh" and "damaged: checksum differs" in "".join(found.lines())
    other = Path(LATENTS.replace("0300x0080", "0320x0080"))
    shutil.copy(LATENTS, other)
    reason = "its item has no such text, clip or size any more"
    assert (one(str(other)).state, one(str(other)).reason) == ("orphaned", reason)
    path.write_bytes(path.read_bytes()[:-9])
    found = one(TEXT)
    assert (found.state, found.reason.partition(":")[0]) == ("stale", "damaged")
    path.unlink()
    assert (one(TEXT).state, one(TEXT).reason, one(TEXT).runs) == ("stale", "new", ["tiny"])
    path.symlink_to("nowhere")
    assert one(TEXT).reason == "damaged: it is a link that leads nowhere"
    path.unlink()
    path.write_bytes(b"of another program")
    assert one(TEXT).reason.startswith("damaged: it ")
    foreign = path.with_name("notes.npz")
    foreign.write_bytes(b"of another program")
    found = one(str(foreign))
    assert found.state == "unreadable"
    assert [line.split()[0] for line in found.lines()][1:] == ["made", "runs"]

    Path("data/ant.png").unlink()
    assert one(LATENTS).reason.startswith("its item is faulty: data/ant.txt: ")
    Path("data/ant.txt").unlink()
    found = one(LATENTS)
    assert (found.state, found.runs) == ("orphaned", []) and found.recipe["kind"] == "latents"
    values = config()
    values["runs"]["tiny"]["resolutions"] = [64]
    found = one(LATENTS.replace("ant_0300x0080", "bee_0080x0064"), values)
    assert (found.state, found.runs) == ("fresh", [])
    values["datasets"] = {"forms": values["datasets"].pop("shapes")}
    values["runs"]["tiny"]["datasets"] = ["forms"]
    assert one(LATENTS, values).reason == "the configuration has no such dataset or model"


@pytest.mark.parametrize(
    ("file", "line"),
    [
        (TEXT.replace("ant", "aant"), "there is no such cache file; the nearest is ant_lumina_te"),
        ("data/aant.txt", "data/aant.txt: there is no such file; the nearest is ant.txt"),
        ("models/ae.safetensors", "no dataset of a run has an item with this file"),
        ("", ".: is a folder; name a run, or a file in it"),
        (str(Path(TEXT).parent), "is a folder; name a run, or a file in it"),
    ],
)
def test_what_cannot_be_explained_is_one_line(file: str, line: str) -> None:
    with pytest.raises(UserError) as error:
        explained(file)
    assert line in str(error.value) and "\n" not in str(error.value)


SIZE = Size(200, 300)
BUCKET, STEPS = {"fit": "bucket"}, {"fit": "bucket", "bucket_reso_steps": 32}
NO_UPSCALE = {"fit": "bucket", "bucket_no_upscale": True}


def differences(before: dict[str, Any], now: dict[str, Any], *, says: bool = True) -> list[str]:
    """Return how a file of some settings differs from what others give.

    Files that earlier releases wrote do not say their settings.
    """
    layout, content, recipe = layout_of("plain"), digest.of_bytes(b"x"), {"kind": "latents"}
    settings, today = (Dataset(path="a", **each) for each in (before, now))
    item, target = inputs_of("x", "x.png"), Target("256", "x.safetensors", None, Size(256, 256))
    view, _ = view_of(layout, settings, item, target, SIZE)
    placing = placing_of(layout, settings, item, target, SIZE, view) if says else ""
    key = target_key(content, digest.of_value(recipe), view)
    stamp = cachefile.stamp(key=key, source=content, recipe=recipe, view=placing)
    said = plain_latents_metadata(1.0, 0.0, SIZE, (256, 256))
    atomic.write(Path(target.path), cachefile.serialize({"x": torch.ones(1)}, said | stamp))
    facts: Any = SimpleNamespace(
        memo=Memo(None),
        config=SimpleNamespace(datasets={"cats": today}),
        layout=lambda _: layout,
        forced_of=lambda *_: set(),
    )
    judge = Judge(facts, "cats", "tiny", [], [])
    return [*map(str, placing_differences(judge, item, target))]


@pytest.mark.parametrize(
    ("before", "now", "words"),
    [
        (STEPS, STEPS, []),
        ({}, BUCKET, ["fit crop -> bucket"]),
        (BUCKET, {}, ["fit bucket -> crop"]),
        (STEPS, NO_UPSCALE, ["bucket_reso_steps 32 -> none", "bucket_no_upscale false -> true"]),
    ],
)
def test_another_placement_is_told_by_the_settings_of_then_and_now(
    before: dict[str, Any], now: dict[str, Any], words: list[str]
) -> None:
    *settings, last = differences(before, now) or [""]
    assert settings == words
    assert re.fullmatch(r"size and crop \S+ -> \S+" if words else "", last)


def test_a_file_that_does_not_say_its_settings_is_explained_by_the_defaults_alone() -> None:
    assert differences({}, BUCKET, says=False) == differences({}, BUCKET)
    (line,) = differences(STEPS, NO_UPSCALE, says=False)
    assert line.startswith("size and crop others -> ")
    assert differences(STEPS, STEPS, says=False) == []
