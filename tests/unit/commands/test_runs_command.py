"""`latentmake runs` prints the ledger of all trainings."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
from latentmake.commands.runs import COLUMNS, runs

pytestmark = pytest.mark.usefixtures("own_folder")

FACTS: Any = SimpleNamespace(config=SimpleNamespace(runs={}))


def print_csv() -> None:
    runs(FACTS, [], COLUMNS[0], as_csv=True, open_page=False, as_json=False)


def test_csv_has_the_columns_and_may_go_nowhere(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    print_csv()
    assert capsys.readouterr().out == f"{','.join(COLUMNS)}\n"
    monkeypatch.setattr(sys, "stdout", None)  # as in `latentmake runs --csv >&-`
    print_csv()
