"""The plan of a run: what a remembered verdict depends on, and what it is spared."""

from __future__ import annotations

from pathlib import Path

import latentmake
import pytest
from latentmake.config import parse
from latentmake.errors import UserError
from latentmake.index.memo import Memo
from latentmake.plan.facts import Facts
from latentmake.plan.planner import make_plan
from latentmake.plan.single import single

CONFIG = {
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
    make_plan(Facts(parse(CONFIG), memo, buildable=["vae", "text"]), ["first"])
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
    facts = Facts(parse(CONFIG), Memo(None), buildable=["vae", "text"])
    folder = "cache/cats/tiny/"
    with pytest.raises(UserError) as caught:
        single(facts, f"{folder}{asked}.safetensors")
    assert line.format(folder) in str(caught.value)
