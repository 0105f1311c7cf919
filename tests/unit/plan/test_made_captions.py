"""Captions that captioners make: targets like latents and embeddings, and never a person's file."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from captioned_world import CaptionedWorld
from latentmake.base.digest import source_stat
from latentmake.config.datasets import Dataset
from latentmake.data.item import IMAGE, File, Item
from latentmake.encode.pixels.plain import frames_of
from latentmake.encode.reading import Loaded, Sample
from latentmake.formats.video import read_frames
from latentmake.geometry.clips import Span
from latentmake.plan.manifest import read_lock
from latentmake.plan.orders import Part
from latentmake.plan.planner import make_plan
from latentmake.request import Request
from order_world import Encoded, carry_out
from video_world import write_video

pytestmark = pytest.mark.usefixtures("own_folder")


def test_a_build_makes_captions_then_their_embeddings_and_then_does_nothing() -> None:
    world = CaptionedWorld("a", "b", "sub/c")
    world.write("b", "a person wrote this")
    world.build()
    assert sorted(world.made) == [
        "flo a",
        "flo sub/c",
        "text a 0",
        "text a 20",
        "text a person wrote this",
        "tiny a",
        "tiny b",
        "tiny sub/c",
    ]
    assert {stem: row.texts for stem, row in world.rows().items()} == {
        "a": ["a 0"],
        "b": None,
        "sub/c": ["a 20"],
    }
    assert {stem: row.captioners for stem, row in world.rows().items()} == {
        "a": ["flo"],
        "b": [],
        "sub/c": ["flo"],
    }
    lock = read_lock("cats")
    assert world.build() == lock
    assert world.made == []
    assert not world.plan().outdated


@pytest.fixture
def built() -> CaptionedWorld:
    """A built project of three pictures without captions."""
    world = CaptionedWorld("a", "b", "c")
    world.build()
    return world


def made(world: CaptionedWorld) -> list[str]:
    """Build twice; return what the first build made, and check that the second made nothing."""
    world.build()
    first = sorted(world.made)
    world.build()
    assert world.made == []
    assert not world.plan().outdated
    return first


def texts(world: CaptionedWorld) -> dict[str, list[str] | None]:
    return {stem: row.texts for stem, row in world.rows().items()}


def test_another_prompt_makes_all_captions_again_and_the_texts_that_differ(
    built: CaptionedWorld,
) -> None:
    built.values["captioners"]["flo"]["prompt"] = "the"
    assert made(built) == ["flo a", "flo b", "flo c", "text the 0", "text the 10", "text the 20"]
    built.values["captioners"]["flo"]["prompt"] = "a"
    assert made(built) == []  # the store has the captions and the embeddings


def test_other_weights_that_answer_the_same_encode_nothing(built: CaptionedWorld) -> None:
    lock = read_lock("cats")
    built.weights("flo", 2)
    assert built.plan().reason == ""
    assert made(built) == ["flo a", "flo b", "flo c"]
    assert read_lock("cats").digest == lock.digest


def test_a_replaced_picture_gets_a_caption_and_nothing_else_does(built: CaptionedWorld) -> None:
    built.image("b", 99)
    assert made(built) == ["flo b", "text a 99", "tiny b"]


def test_a_written_caption_comes_first_and_the_made_one_comes_back(built: CaptionedWorld) -> None:
    written = Path("data/b.txt")
    written.write_text("a 10")  # the text that the captioner made
    assert made(built) == []
    written.write_text("my own words")
    assert made(built) == ["text my own words"]
    assert Path("cache/cats/captions/flo/b.json").is_file()  # it waits for its return
    assert written.read_text() == "my own words"
    written.unlink()
    assert made(built) == []
    assert texts(built)["b"] == ["a 10"]


@pytest.mark.parametrize("name", ["head", "entries", "caches", "places"])
def test_a_captioner_may_have_any_name(built: CaptionedWorld, name: str) -> None:
    built.values["captioners"] = {name: built.values["captioners"].pop("flo")}
    built.values["datasets"]["cats"]["captioner"] = name
    assert made(built) == []  # the store has what it made under another name
    built.image("b", 99)
    assert made(built) == [f"{name} b", "text a 99", "tiny b"]
    caption = Path(f"cache/cats/captions/{name}/c.json")
    caption.unlink()
    assert made(built) == []
    assert caption.is_file()  # linked from the store


def test_captions_of_two_captioners_join(built: CaptionedWorld) -> None:
    built.weights("tags", 3)
    built.values["captioners"]["tags"] = {"model": "models/tags", "prompt": "tag"}
    built.values["datasets"]["cats"]["captioner"] = ["flo", "tags"]
    assert made(built) == [
        "tags a",
        "tags b",
        "tags c",
        "text a 0,tag 0",
        "text a 10,tag 10",
        "text a 20,tag 20",
    ]
    assert built.rows()["a"].captioners == ["flo", "tags"]
    built.values["datasets"]["cats"]["captions"] = {"caption_and_tags": "tags_first"}
    assert made(built) == ["text tag 0,a 0", "text tag 10,a 10", "text tag 20,a 20"]
    del built.values["datasets"]["cats"]["captions"]
    built.values["datasets"]["cats"]["captioner"] = "flo"
    assert made(built) == []


def test_without_the_captioner_items_lack_captions_and_with_it_they_are_back(
    built: CaptionedWorld,
) -> None:
    del built.values["datasets"]["cats"]["captioner"]
    assert "a.png: has no caption file" in built.plan().faults["cats"][0].line
    built.values["datasets"]["cats"]["captioner"] = "flo"
    assert made(built) == []


def test_words_that_are_changed_afterwards_make_no_caption(built: CaptionedWorld) -> None:
    built.values["captioners"]["flo"] |= {"trigger": "sks", "replace": {"20": "twenty"}}
    assert made(built) == ["text sks, a 0", "text sks, a 10", "text sks, a twenty"]
    assert texts(built)["c"] == ["sks, a twenty"]


@pytest.mark.parametrize("remembered", [False, True])
def test_a_removed_picture_takes_its_caption_with_it(
    built: CaptionedWorld, remembered: bool
) -> None:
    if remembered:
        built.plan()  # the memo keeps a state in which all is fresh
    Path("data/c.png").unlink()
    assert made(built) == []
    assert not Path("cache/cats/captions/flo/c.json").exists()
    built.image("c", 20)
    assert made(built) == []  # all of it comes from the store


def test_variants_are_drawn_in_the_job_as_the_plan_would_draw_them() -> None:
    world = CaptionedWorld("a", "b")
    captions = {"variants": 2, "shuffle_caption": True, "caption_prefix": "in {folder}:"}
    world.values["datasets"]["cats"]["captions"] = captions
    world.answer = lambda prompt, sample: f"x, y, z {sample.item.stem}"  # type: ignore[method-assign]
    assert len([name for name in made(world) if name.startswith("text")]) == 4
    drawn = texts(world)
    assert len({*(drawn["a"] or [])}) == 2
    facts = world.facts()
    assert {item.stem: item.texts for item in facts.items("cats", "tiny")[0]} == drawn


def test_an_empty_answer_is_a_fault_that_is_skipped_or_ends_the_job() -> None:
    world = CaptionedWorld("a", "b")
    answer = world.answer
    world.answer = lambda prompt, sample: (  # type: ignore[method-assign]
        " " if sample.item.stem == "b" else answer(prompt, sample)
    )
    with pytest.raises(Exception, match=r"b\.png.*the answer is empty"):
        world.build()
    world.values["datasets"]["cats"]["on_error"] = "skip"
    assert [name for name in made(world) if name.endswith("b")] == ["flo b", "tiny b"]
    assert list(texts(world)) == ["a"]
    assert "the answer is empty" in read_lock("cats").aside["cats"][0]["line"]
    world.write("b", "a person helps")
    assert made(world) == ["text a person helps"]


def test_an_edited_file_of_a_made_caption_is_made_again(built: CaptionedWorld) -> None:
    path = Path("cache/cats/captions/flo/a.json")
    path.write_text(path.read_text().replace("a 0", "an edit"))
    assert made(built) == ["flo a"]
    assert texts(built)["a"] == ["a 0"]


def test_texts_that_a_trainer_encodes_itself_are_known_once_they_are_made() -> None:
    world = CaptionedWorld("a", "b")
    world.values["models"]["tiny"] |= {"layout": "sdscripts", "architecture": "sd1"}
    assert made(world) == ["flo a", "flo b", "tiny a", "tiny b"]
    assert texts(world) == {"a": ["a 0"], "b": ["a 10"]}
    lock = read_lock("cats")
    world.values["captioners"]["flo"]["prompt"] = "the"
    assert [str(line) for line in world.plan().outdated] == [
        "2 of 2 texts of cats: a captioner makes them"
    ]
    assert made(world) == ["flo a", "flo b"]
    assert read_lock("cats").digest != lock.digest


def test_a_text_that_a_command_names_has_its_caption_made_first() -> None:
    world = CaptionedWorld("a", "b")
    text = "cache/cats/tiny/text/a.text.safetensors"
    facts = world.facts()
    plan = make_plan(facts, [], files=[text])
    captions, texts = Request([text], facts.config).orders(plan)
    assert captions.paths == ["cache/cats/captions/flo/a.json"]
    assert (texts.paths, texts.awaits) == ([text], (str(captions.receipt),))
    world.build()
    built = world.facts()
    assert make_plan(built, [], files=[text]).jobs == []
    assert [*make_plan(built, [], files=[text]).named] == [Part("cats", "tiny", "text")]


def test_each_gpu_gets_a_job_of_captions_and_texts_wait_for_all_of_them() -> None:
    world = CaptionedWorld(*(f"{number:03}" for number in range(130)))
    jobs = make_plan(world.facts(), ["cats"], side_by_side=2).jobs
    captions = [job for job in jobs if job.orders[0].kind == "captions"]
    assert [len(job.orders[0].items) for job in captions] == [65, 65]
    receipts = {receipt for job in captions for receipt in job.receipts}
    awaited = {job.orders[0].kind: {*job.awaits} for job in jobs}
    assert awaited == {"captions": set(), "latents": set(), "text": receipts}


def test_a_captioner_that_runs_out_of_memory_takes_pictures_one_by_one() -> None:
    world = CaptionedWorld("a", "b", "c", "d")
    (order,) = (order for order in world.plan().orders if order.kind == "captions")
    batches = list[int]()

    def answers(samples: list[Sample]) -> Encoded:
        batches.append(len(samples))
        if len(samples) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
        return [({}, {"caption": f"a picture of {samples[0].item.stem}"})]

    carry_out(order, encoder=Loaded(answers, size=4))
    assert (batches[0], sorted(batches)[:4]) == (4, [1, 1, 1, 1])
    written = {stem: json.loads(path.read_text())["text"] for stem, path in made_files()}
    assert written == {stem: f"a picture of {stem}" for stem in "abcd"}


def made_files() -> list[tuple[str, Path]]:
    return [(path.stem, path) for path in Path("cache/cats/captions/flo").iterdir()]


def test_a_captioner_sees_frames_of_the_part_of_a_video_that_its_row_names() -> None:
    write_video(Path("a.mp4"), "libx264", 33)
    stat = source_stat(Path("a.mp4").stat())
    item = Item("a", (File(IMAGE, "a.mp4", stat),))
    settings = Dataset(path=".", target_frames=[9])
    every = [pixels for _, pixels in read_frames("a.mp4", range(33)) if pixels is not None]

    def seen(item: Item, count: int) -> list[int]:
        frames = frames_of(item, settings, count)
        return [
            next(index for index, one in enumerate(every) if np.array_equal(one, frame))
            for frame in frames
        ]

    assert seen(item, 3) == [0, 16, 32]
    assert seen(item._replace(span=Span(first=20, frames=9)), 2) == [20, 28]
    assert len(seen(item, 100)) == 33
