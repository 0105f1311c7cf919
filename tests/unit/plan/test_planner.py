"""The plan of runs: their prompts, the orders of one dataset, and one cache file by its name."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from captioned_world import CaptionedWorld
from latentmake.base.atomic import TEMPORARY_SUFFIX
from latentmake.base.errors import ConfigError, UserError
from latentmake.base.workspace import OWNER
from latentmake.config.root import parse
from latentmake.data.item import Item
from latentmake.data.memo import Memo
from latentmake.encode.reading import Sample
from latentmake.graph import Graph
from latentmake.pages.plan_report import plan_table
from latentmake.plan.facts import Facts
from latentmake.plan.judge import PartState
from latentmake.plan.orders import PROMPTS, Order, Target, Work, prompt_path
from latentmake.plan.planner import make_plan
from latentmake.plan.store import refuse_other_items
from order_world import Encoded
from PIL import Image

CONFIG: dict[str, Any] = {
    "datasets": {"cats": {"path": "data"}},
    "models": {"tiny": {"vae": "vae", "text": "text"}},
    "runs": {"first": {"datasets": "cats", "model": "tiny", "resolutions": [64]}},
}


pytestmark = pytest.mark.usefixtures("own_folder")


def put(*names: str) -> None:
    Path("data").mkdir(exist_ok=True)
    for name in names:
        Path("data", name).write_text(name)


@pytest.mark.parametrize(
    ("asked", "line"),
    [
        ("64/red_arow.latents", "no item has a cache file of this name; check the names of"),
        ("text.7/blue.text", "no item has a cache file of this name; check the names of"),
        ("63/blue.latents", "63/blue.latents.safetensors: 63 pixels are not a multiple"),
        ("99999/blue.latents", "99999/blue.latents.safetensors: there is no such resolution"),
        ("096/blue.latents", "is no name of a resolution; write `96`"),
        ("64/silent.latents", "data/silent.png: has no caption file; write data/silent.txt"),
    ],
)
def test_a_cache_file_of_no_item_is_refused(asked: str, line: str) -> None:
    put("blue.png", "blue.txt", "red_arrow.png", "red_arrow.txt", "silent.png")
    with pytest.raises(UserError) as caught:
        make_plan(facts_of(CONFIG), [], files=[f"cache/cats/tiny/{asked}.safetensors"])
    assert line in str(caught.value)


def test_cache_files_by_name_are_made_together_at_any_resolution() -> None:
    put("blue.png", "blue.txt", "red.png", "red.txt")
    latents = [f"cache/cats/tiny/{x}.latents.safetensors" for x in ("64/blue", "64/red", "96/red")]
    text = "cache/cats/tiny/text/red.text.safetensors"
    facts = facts_of({**CONFIG, "datasets": {"cats": {"path": "data", "on_error": "skip"}}})
    plan = make_plan(facts, [], files=[*latents, text])
    assert [sorted(order.paths) for order in plan.orders] == [latents, [text]]
    assert not any(order.skips for order in plan.orders)
    graph = Graph(facts.config, plan, {})
    graph.declare(facts)
    receipts = {order.kind: str(order.receipt) for order in plan.orders}
    assert graph.nodes[latents[2]] == ({"image": ["data/red.png"]}, receipts["latents"])
    assert graph.nodes[text] == ({"caption": ["data/red.txt"]}, receipts["text"])
    # Beside their run they are no further work.
    plan = make_plan(facts, ["first"], files=[latents[0], latents[2]])
    assert sorted(len(order.paths) for order in plan.orders) == [1, 2, 2]


@pytest.mark.parametrize(("graph", "declared"), [("whole", 4), ("auto", 4), ("batches", 0)])
def test_a_whole_graph_has_each_cache_file_of_a_run(graph: str, declared: int) -> None:
    put("blue.png", "blue.txt", "a{b}.png", "a{b}.txt")
    facts = facts_of({**CONFIG, "graph": graph})
    found = Graph(facts.config, make_plan(facts, ["first"]), {})
    found.declare(facts)
    assert len(found.nodes) == declared
    assert len(found.files("first", "latents")) == declared // 4  # braces are a pattern
    assert bool(found.words) == (graph == "batches")


@pytest.mark.parametrize("captioned", [0, 1])
def test_faulty_items_are_told_in_place_of_the_number_that_is_held_out(captioned: int) -> None:
    put(
        *(f"{number}.png" for number in range(4)), *(f"{number}.txt" for number in range(captioned))
    )
    run = {**TINY["runs"]["first"], "validation": {"items": 2}}
    values = {**TINY, "runs": {"first": run}}
    plan = make_plan(facts_of(values), ["first"])
    assert len(plan.runs["first"].faults["cats"]) == 4 - captioned
    skipped = {**values, "datasets": {"cats": {"path": "data", "on_error": "skip"}}}
    if captioned:
        with pytest.raises(ConfigError, match="2 of 1 different sources would be held out"):
            make_plan(facts_of(skipped), ["first"])
    else:  # the job says that no item is left
        make_plan(facts_of(skipped), ["first"])


def test_a_dataset_whose_items_are_all_skipped_leaves_nothing_to_do() -> None:
    world = CaptionedWorld("a", "b")
    Path("gone.jsonl").write_text('{"image": "gone/c.png", "prompt": "a cat"}\n')
    world.values["datasets"]["gone"] = {"path": "gone.jsonl", "on_error": "skip"}
    world.values["runs"]["cats"]["datasets"] = ["cats", "gone"]
    world.build()
    assert world.plan().outdated == []
    Path("gone").mkdir()
    shutil.copy("data/a.png", "gone/c.png")
    world.build()
    assert world.plan().outdated == []
    shutil.rmtree("gone")
    assert "caches of gone/64" in str(world.plan().outdated)
    world.build()
    assert world.plan().outdated == []


def test_an_item_that_one_model_refuses_is_not_skipped_by_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = CaptionedWorld("a", "b")
    world.values["datasets"]["cats"]["on_error"] = "skip"
    world.values["models"]["half"] = {**world.values["models"]["tiny"], "vae_dtype": "float16"}
    encode = world._encoded

    def encoded(order: Order, samples: list[Sample]) -> Encoded:
        faulty = [order.model == "half" and sample.item.stem == "b" for sample in samples]
        pairs = zip(encode(order, samples), faulty, strict=True)
        return [
            ({name: value * (not zeros) for name, value in made.items()}, said)
            for (made, said), zeros in pairs
        ]

    monkeypatch.setattr(world, "_encoded", encoded)
    for model, trained in (("half", ["a"]), ("tiny", ["a", "b"]), ("half", ["a"])):
        world.values["runs"]["cats"]["model"] = model
        world.build()
        assert [*world.rows()] == trained
        assert world.plan().outdated == []


def test_a_plan_counts_its_stale_targets_and_orphans_and_says_that_a_lock_was_deleted() -> None:
    put("a.png", "a.txt")
    half = Path(f"cache/cats/tiny/64/.b{TEMPORARY_SUFFIX}")
    half.parent.mkdir(parents=True)
    half.touch()
    reasons = make_plan(facts_of(CONFIG), ["first"]).runs["first"].outdated
    assert [x.name for x in reasons] == [
        "1 of 1 latents of cats: new",
        "1 of 1 texts of cats: new",
        "there is no lock of the dataset yet",
        "cache files without an item: 1",
    ]


def test_a_command_that_only_asks_serialises_no_order(monkeypatch: pytest.MonkeyPatch) -> None:
    put("a.png", "a.txt")
    monkeypatch.setattr(Order, "_texts", property(lambda _: pytest.fail("it was serialised")))
    facts = Facts(parse(CONFIG), Memo(None), encoders=False, read_only=True)
    plan = make_plan(facts, ["first"])
    assert "latents" in plan_table(plan, plan.orders)
    assert plan.orders and [job.reuses for job in plan.jobs] == [False] * len(plan.jobs)


WAN = {
    "datasets": {"cats": {"path": "data", "fit": "bucket"}},
    "models": {"wan": {"task": "t2v-1.3B", "vae": "vae", "text": "text"}},
    "runs": {"first": {"datasets": "cats", "model": "wan", "resolutions": [64]}},
}
TINY = {
    **CONFIG,
    "models": {"tiny": {"vae": "vae", "text": "text", "unet": "unet"}},
    "runs": {"first": {**CONFIG["runs"]["first"], "trainer": {"kind": "sd"}}},
}


@pytest.fixture
def cats(own_folder: None) -> None:
    Path("data").mkdir()
    Image.new("RGB", (64, 64)).save("data/a.png")
    Path("data/a.txt").write_text("a caption")


def facts_of(values: dict[str, Any]) -> Facts:
    return Facts(parse(values), Memo(None), encoders=False)


def prompts_to_encode(values: dict[str, Any], *generated: str) -> dict[str, str]:
    """Return the texts of prompts, with their cache files, that a plan would encode."""
    plan = make_plan(facts_of(values), ["first"], generated=generated)
    return {
        work.item.text or "": target.path
        for order in plan.orders
        if order.dataset == "_prompts"
        for work in order.items
        for target in work.targets
    }


@pytest.mark.usefixtures("cats")
def test_prompts_are_encoded_when_they_are_asked_for_and_lie_where_the_layout_has_texts() -> None:
    values = {**WAN, "prompt": "a boat"}
    assert not prompts_to_encode(values)
    found = prompts_to_encode(values, "first")
    assert found.keys() == {"a boat", ""}
    for text, path in found.items():
        assert re.fullmatch(r"cache/_prompts/wan/text/[0-9a-f]{20}_wan_te\.safetensors", path)
        assert prompt_path(parse(values), "wan", text) == path
    trained = prompts_to_encode(TINY)
    assert trained.keys() == {""} and trained[""].endswith(".text.safetensors")


@pytest.mark.usefixtures("cats")
def test_a_new_prompt_of_clips_leaves_those_of_the_training_as_they_are() -> None:
    values = {**TINY, "prompt": "a boat"}
    facts = facts_of(values)
    plan = make_plan(facts, ["first"], generated=["first"]).runs["first"]
    trainer = facts.config.runs["first"].trainer
    assert trainer is not None
    plan.lock = "the lock of a finished training"
    assert plan.awaited(trainer.prompts)
    assert [*map(str, plan.awaited(["a boat"]))] == ["prompts are to be encoded"]
    assert not plan.awaited(["a car"])


def test_one_dataset_is_cut_so_that_all_gpus_work() -> None:
    put(*(f"{number}.{ending}" for number in range(200) for ending in ("png", "txt")))

    def items(side_by_side: int | None) -> list[list[int]]:
        """Return the numbers of items of each order, for each job for latents."""
        jobs = make_plan(facts_of(CONFIG), ["first"], side_by_side=side_by_side).jobs
        found = [job.orders for job in jobs if job.orders[0].kind == "latents"]
        return [[len(order.items) for order in orders] for orders in found]

    assert items(1) == items(None) == [[200]]
    assert items(2) == [[100], [100]]
    assert items(8) == [[64], [64], [64], [8]]  # loading a model for a few takes longer


@pytest.fixture
def projects(tmp_path: Path) -> tuple[Path, Path]:
    """Two projects with one cache folder, which the first owns."""
    made = tmp_path / "1", tmp_path / "2"
    for place in made:
        (place / ".latentmake").mkdir(parents=True)
        (place / "cache").symlink_to(tmp_path / "shared")
    for dataset in ("cats", PROMPTS):
        (tmp_path / "shared" / dataset).mkdir(parents=True)
        (tmp_path / "shared" / dataset / OWNER).write_text(f"{made[0]}/cache/{dataset}")
    return made


def part(*, new: int = 0, fresh: int = 0, edited: int = 0, orphan: str | None = None) -> PartState:
    targets = [Target("64", "new", reason="new")] * new
    targets += [Target("64", "edited", "key@1", reason="edited")] * edited
    return PartState(fresh, [Work(Item("a"), tuple(targets))], [] if orphan is None else [orphan])


def test_other_items_in_anothers_folder_are_refused_and_the_same_are_shared(
    projects: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = projects
    mine = [part(fresh=1, new=1, edited=1, orphan="cache/cats/m/64/b")]
    monkeypatch.chdir(first)
    refuse_other_items("cats", mine)
    monkeypatch.chdir(second)
    with pytest.raises(ConfigError) as refused:
        refuse_other_items("cats", mine)
    line = str(refused.value)
    assert line.startswith(f"cache/cats: the project {first} uses this folder too, and its items")
    assert f"those of {second}: 3 cache files differ; rename the dataset in one of them" in line
    half = f"cache/cats/m/64/.x{TEMPORARY_SUFFIX}"
    mine = [part(fresh=3), part(new=3, orphan=half)]  # one more resolution
    refuse_other_items("cats", mine)
    assert mine[1].orphans == []  # the other project may be writing it


def test_prompts_of_another_project_stay(
    projects: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    for place, orphans in zip(projects, (["theirs"], []), strict=True):
        monkeypatch.chdir(place)
        mine = [part(fresh=1, new=1, orphan="theirs")]
        refuse_other_items(PROMPTS, mine)
        assert mine[0].orphans == orphans
