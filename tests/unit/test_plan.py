"""The plan of a run: what a remembered verdict depends on, and what it is spared."""

from __future__ import annotations

from pathlib import Path

import latentmake
import pytest
from latentmake.config import parse
from latentmake.memo import Memo
from latentmake.plan import Planner

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
    Planner(parse(CONFIG), memo, buildable=["vae", "text"]).plan(["first"])
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
