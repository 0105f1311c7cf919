"""Orders that one process carries out do not stop each other, and share a GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from latentmake.caches.encode import carry_out_all
from latentmake.caches.encoders import Loaded
from latentmake.errors import SourceError
from latentmake.plan.orders import Order
from latentmake.plan.receipts import read_receipt
from order_world import Encoder, order, put_image


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def latents(*stems: str, **options: Any) -> Order:
    sources = {stem: put_image(Path(f"data/{stem}.png"), (ord(stem), 2, 3)) for stem in stems}
    return order("latents", {**sources}, **options)


def carry(*orders: Order, **options: Any) -> list[str]:
    """Carry out some orders with one encoder; return the stems that it got."""
    encoder = Encoder()
    loaded = Loaded(encoder, 1)
    given = {"say": lambda _: None, "lease": contextlib.nullcontext, "may_skip": True} | options
    carry_out_all(orders, threads=1, encoder_of=lambda _: loaded, **given)
    return list(encoder.stems)


def test_each_order_leaves_its_receipt() -> None:
    orders = [latents("a", "b"), latents("c")]
    assert sorted(carry(*orders)) == ["a", "b", "c"]
    assert [read_receipt(each.receipt).counts["encoded"] for each in orders] == [2, 1]


def test_a_faulty_item_stops_no_other_order_and_all_are_named() -> None:
    orders = [latents("a", "b"), latents("c"), latents("d")]
    for stem in "ad":
        Path(f"data/{stem}.png").write_bytes(b"")
    with pytest.raises(SourceError) as caught:
        carry(*orders)
    for words in ("1 of 2 items", "a.png: is an empty", "1 of 1 items", "d.png: is an empty"):
        assert words in str(caught.value)
    assert [each.receipt.exists() for each in orders] == [False, True, False]
    put_image(Path("data/a.png"), (1, 2, 3))
    put_image(Path("data/d.png"), (4, 5, 6))
    assert sorted(carry(*orders)) == ["a", "d"]


def test_what_an_order_has_made_is_linked_for_the_next() -> None:
    orders = [latents("a", "b"), latents("c", "d")]
    Path("data/c.png").write_bytes(Path("data/b.png").read_bytes())
    assert sorted(carry(*orders)) == ["a", "b", "d"]
    assert read_receipt(orders[1].receipt).counts["linked"] == 1
    first, second = (list(read_receipt(each.receipt).targets) for each in orders)
    assert any(Path(one).samefile(other) for one in first for other in second)


def test_an_order_is_read_when_it_is_its_turn() -> None:
    first, second = latents("a"), latents("b")

    def orders() -> Iterator[Order]:
        yield first
        assert first.receipt.exists()
        yield second

    carry_out_all(
        orders(),
        say=lambda _: None,
        threads=1,
        may_skip=True,
        encoder_of=lambda _: Loaded(Encoder(), 1),
        lease=contextlib.nullcontext,
    )
    assert second.receipt.exists()
