"""The plan of a run: what a remembered verdict depends on, and what it is spared."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import latentmake
import numpy as np
import pytest
from latentmake.config.root import parse
from latentmake.errors import UserError
from latentmake.index.memo import Memo
from latentmake.plan.facts import Facts
from latentmake.plan.planner import make_plan, single
from latentmake.plan.target import prompt_path
from PIL import Image

CONFIG: dict[str, Any] = {
    "datasets": {"cats": {"path": "data"}},
    "models": {"tiny": {"vae": "vae", "text": "text"}},
    "runs": {"first": {"datasets": "cats", "model": "tiny", "resolutions": [64]}},
}


class Asked(Memo):
    """A memo that notes which verdicts it is asked for."""

    def __init__(self) -> None:
        super().__init__(None)
        self.questions: list[str] = []

    def verdict(self, question: str) -> str | None:
        self.questions.append(question)
        return super().verdict(question)


def questions() -> list[str]:
    memo = Asked()
    make_plan(Facts(parse(CONFIG), memo, encoders=False), ["first"])
    assert memo.questions
    return memo.questions


@pytest.mark.parametrize(("name", "value"), [("__version__", "9.9"), ("PLAN_VERSION", 99)])
def test_no_verdict_of_other_planning_code_is_believed(
    name: str, value: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for ending in ("png", "txt"):
        (tmp_path / "data").mkdir(exist_ok=True)
        (tmp_path / f"data/a.{ending}").write_text("a")
    before = questions()
    assert questions() == before
    monkeypatch.setattr(latentmake, name, value)
    assert not set(questions()) & set(before)


def test_files_that_nothing_uses_are_told_once_for_all_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    for name in ("a.png", "a.txt", "notes.pdf"):
        (tmp_path / "data" / name).write_text("a")
    models = {"tiny": {"vae": "vae", "text": "text"}, "other": {"vae": "vae", "text": "text"}}
    second = {"datasets": "cats", "model": "other", "resolutions": [64]}
    config = parse({**CONFIG, "models": models, "runs": {**CONFIG["runs"], "second": second}})
    make_plan(Facts(config, Memo(None), encoders=False), ["first", "second"])
    assert capsys.readouterr().err == "note: datasets.cats: 1 file is not used: notes.pdf\n"


@pytest.mark.parametrize(
    ("asked", "line"),
    [
        (
            "64/red_arow.latents",
            "no item has a cache file of this name; the nearest is {}64/red_arrow.latents",
        ),
        ("64/" + "z" * 99, "no item has a cache file of this name; the nearest is {}64/blue."),
        (
            "text/blu.text",
            "no item has a cache file of this name; the nearest is {}text/blue.text.",
        ),
        ("text.7/blue.text", "no item has a cache file of this name; check the name of its folder"),
        ("64/silent.latents", "data/silent.png: has no caption file; write data/silent.txt"),
    ],
)
def test_a_cache_file_of_no_item_is_answered_with_the_nearest(
    asked: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    for name in ("blue.png", "blue.txt", "red_arrow.png", "red_arrow.txt", "silent.png"):
        (tmp_path / "data" / name).write_text(name)
    facts = Facts(parse(CONFIG), Memo(None), encoders=False)
    folder = "cache/cats/tiny/"
    with pytest.raises(UserError) as caught:
        single(facts, f"{folder}{asked}.safetensors")
    assert line.format(folder) in str(caught.value)


@pytest.mark.parametrize("models", [("ours", "theirs"), ("theirs", "ours")])
def test_what_one_encoder_cannot_take_is_faulty_for_that_one_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, models: tuple[str, str]
) -> None:
    monkeypatch.chdir(tmp_path)
    np.savez(tmp_path / "a.npz", frames=np.zeros((9, 32, 48, 3), np.uint8))
    (tmp_path / "list.jsonl").write_text('{"video": "a.npz", "prompt": "p"}\n')
    weights = {"task": "t2v-1.3B", "vae": "vae", "text": "text"}
    values = {
        "datasets": {"cats": {"path": "list.jsonl", "target_frames": [9], "fit": "bucket"}},
        "models": {"ours": weights, "theirs": {**weights, "encoder": "musubi"}},
        "musubi_tuner": {"path": "musubi-tuner"},
        "runs": {x: {"datasets": "cats", "model": x, "resolutions": [32]} for x in models},
    }
    facts = Facts(parse(values), Memo(None), encoders=False)
    faulty = {model: len(facts.items("cats", model)[1]) for model in models}
    assert faulty == {"ours": 0, "theirs": 1}
    assert [len(facts.known_faults("cats", model)) for model in ("ours", "theirs")] == [0, 1]


# -- prompts --------------------------------------------------------------------------------------

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
def cats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    Image.new("RGB", (64, 64)).save(tmp_path / "data/a.png")
    (tmp_path / "data/a.txt").write_text("a caption")
    return tmp_path


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


def test_prompts_lie_where_the_layout_has_texts(cats: Path) -> None:
    values = {**WAN, "prompt": "a boat"}
    found = prompts_to_encode(values, "first")
    assert found.keys() == {"a boat", ""}
    for text, path in found.items():
        assert re.fullmatch(r"cache/_prompts/wan/text/[0-9a-f]{20}_wan_te\.safetensors", path)
        assert prompt_path(parse(values), "wan", text) == path


def test_prompts_of_clips_are_encoded_when_clips_are_asked_for(cats: Path) -> None:
    assert not prompts_to_encode({**WAN, "prompt": "a boat"})
    trained = prompts_to_encode(TINY)
    assert trained.keys() == {""}
    assert trained[""].endswith(".text.safetensors")


def test_a_new_prompt_of_clips_leaves_those_of_the_training_as_they_are(cats: Path) -> None:
    values = {**TINY, "prompt": "a boat"}
    facts = facts_of(values)
    plan = make_plan(facts, ["first"], generated=["first"]).runs["first"]
    trainer = facts.config.runs["first"].trainer
    assert trainer is not None
    assert awaits_prompts(plan, trainer.prompts)
    assert awaits_prompts(plan, ["a boat"])
    assert not awaits_prompts(plan, ["a car"])


def test_one_dataset_is_cut_so_that_all_gpus_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    for number in range(200):
        for ending in ("png", "txt"):
            (tmp_path / f"data/{number}.{ending}").write_text("a")

    def items(side_by_side: int | None) -> list[list[int]]:
        """Return the numbers of items of each order, for each job for latents."""
        jobs = make_plan(facts_of(CONFIG), ["first"], side_by_side=side_by_side).jobs
        found = [job.orders for job in jobs if job.orders[0].kind == "latents"]
        return [[len(order.items) for order in orders] for orders in found]

    assert items(1) == [[200]]
    assert items(None) == [[200]]
    assert items(2) == [[100], [100]]
    assert items(8) == [[64], [64], [64], [8]]  # loading a model for a few takes longer
