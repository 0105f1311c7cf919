"""A job names its bottleneck, and its receipt tells what it encoded in which time."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
from latentmake.caches import stages
from latentmake.caches.encode import carry_out
from latentmake.caches.encoders import Loaded
from latentmake.plan.orders import Order
from latentmake.plan.receipts import Receipt, read_receipt
from order_world import Encoder, order, put_image

RECEIPT = Path(".latentmake/orders/receipt.json")


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Order:
    monkeypatch.chdir(tmp_path)
    items = {f"{n}": put_image(Path(f"data/{n}.png"), (n, 2, 3)) for n in range(6)}
    return order("latents", {**items}, parts=("16", "32"))


def carried_out(work: Order) -> tuple[str, Receipt]:
    said: list[str] = []
    receipt = carry_out(work, RECEIPT, say=said.append, encoder=Loaded(Encoder(), 1))
    assert read_receipt(RECEIPT) == receipt
    return said[-1], receipt


def test_the_last_line_ends_with_the_bottleneck(
    work: Order, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stages, "_SHORTEST", 0.0)
    line, receipt = carried_out(work)
    words = r"device busy \d+%, bottleneck: (reading|encoding|writing)( \([^()]+\))?"
    assert re.fullmatch(rf"latents of cats: 12 encoded; {words}", line)
    assert line.endswith(f"; {receipt.words}")


def test_a_receipt_tells_number_and_seconds_of_what_was_encoded(
    work: Order, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stages, "_SHORTEST", math.inf)
    line, receipt = carried_out(work)
    assert line == "latents of cats: 12 encoded"  # it was short
    assert receipt.words == ""
    assert set(receipt.stages) == {"reading", "encoding", "writing"}
    assert 0 < sum(receipt.stages.values()) <= receipt.seconds
    for path in work.paths[:6]:
        Path(path).unlink()
    _, again = carried_out(work)
    assert again.counts["encoded"] == 6
    _, idle = carried_out(work)
    assert idle.work == ""
