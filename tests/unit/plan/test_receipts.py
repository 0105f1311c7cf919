"""Receipts survive being written and read, and tell the next plan what jobs read and wrote."""

from __future__ import annotations

from pathlib import Path

import pytest
from latentmake.data.memo import Memo
from latentmake.plan.receipts import Receipt, learn_receipts, read_receipt
from order_world import order

pytestmark = pytest.mark.usefixtures("own_folder")


def test_a_receipt_survives_being_written_and_read() -> None:
    fault = dict.fromkeys(("dataset", "stem", "path", "digest", "line"), "é")
    receipt = Receipt({"a": (1, 2, 3, 4, "d")}, {"b": (1, 2, 3, "k")}, [fault], {"x": 1}, 2.5)
    receipt.write(Path("sub/receipt.json"))
    assert read_receipt(Path("sub/receipt.json")) == receipt


@pytest.mark.parametrize("text", ["", "{", "{}", '{"targets": {}}', '{"else": 1}', "[" * 9999])
def test_a_damaged_receipt_is_named_and_counts_as_missing(
    text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("receipt.json").write_text(text)
    assert read_receipt(Path("receipt.json")) is None
    assert capsys.readouterr().err.startswith("note: receipt.json is damaged (")


def test_the_next_plan_knows_what_jobs_read_and_wrote_and_a_damaged_receipt_stops_nothing() -> None:
    made, damaged = order("text", {"a": "a"}), order("text", {"b": "b"})
    read = {"a.png": [1, 2, 3, 4, "content", 64, 48, True], "a.txt": [1, 2, 3, 4, "words"]}
    Receipt(read, {"cache/a": [5, 6, 7, "key"]}, [], {}, 0.0).write(made.receipt)
    damaged.receipt.write_text("{")
    with Memo(None) as memo:
        learn_receipts(memo)
        assert memo.sources.below("") == {
            "a.png": ((1, 2, 3, 4), "content"),
            "a.txt": ((1, 2, 3, 4), "words"),
        }
        assert memo.pictures(["content", "words"], upright=True) == {"content": (64, 48)}
        assert memo.targets.below("") == {"cache/a": ((5, 6, 7), "key")}
        assert {*memo.receipts.below("")} == {made.receipt.name, damaged.receipt.name}
