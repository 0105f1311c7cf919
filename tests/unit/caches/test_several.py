"""Orders that one process carries out do not stop each other, and share a GPU."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from latentmake.caches.encode import carry_out
from latentmake.caches.inputs import Loaded
from latentmake.errors import SourceError
from latentmake.plan.orders import Order
from latentmake.plan.receipts import read_receipt
from order_world import Encoder, order, put_image, silent


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def latents(*stems: str, **options: Any) -> Order:
    sources = {stem: put_image(Path(f"data/{stem}.png"), (ord(stem), 2, 3)) for stem in stems}
    return order("latents", {**sources}, **options)


def carry(orders: Iterable[Order], batch_size: int = 1) -> Encoder:
    """Carry out some orders with one encoder."""
    encoder = Encoder()
    carry_out(orders, say=silent, load=lambda _: Loaded(encoder, batch_size))
    return encoder


def test_each_order_leaves_its_receipt() -> None:
    orders = [latents("a", "b"), latents("c")]
    assert sorted(carry(orders).stems) == ["a", "b", "c"]
    assert [read_receipt(each.receipt).counts["encoded"] for each in orders] == [2, 1]


def test_a_faulty_item_stops_no_other_order_and_all_are_named() -> None:
    orders = [latents("a", "b"), latents("c"), latents("d")]
    for stem in "ad":
        Path(f"data/{stem}.png").write_bytes(b"")
    with pytest.raises(SourceError) as caught:
        carry(orders)
    for words in ("1 of 2 items", "a.png: is an empty", "1 of 1 items", "d.png: is an empty"):
        assert words in str(caught.value)
    assert [each.receipt.exists() for each in orders] == [False, True, False]
    put_image(Path("data/a.png"), (1, 2, 3))
    put_image(Path("data/d.png"), (4, 5, 6))
    assert sorted(carry(orders).stems) == ["a", "d"]


def test_what_an_order_has_made_is_linked_for_the_next() -> None:
    orders = [latents("a", "b"), latents("c", "d")]
    Path("data/c.png").write_bytes(Path("data/b.png").read_bytes())
    assert sorted(carry(orders).stems) == ["a", "b", "d"]
    assert read_receipt(orders[1].receipt).counts["linked"] == 1
    first, second = (list(read_receipt(each.receipt).targets) for each in orders)
    assert any(Path(one).samefile(other) for one in first for other in second)


def test_a_batch_holds_samples_of_several_orders_and_each_leaves_its_receipt_once_it_is_done() -> (
    None
):
    first, second, third = latents("a"), latents("b", "c"), latents("d")

    def orders() -> Iterator[Order]:
        yield first
        assert not first.receipt.exists()
        yield second
        deadline = time.monotonic() + 60
        while not Path(first.paths[0]).exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not second.receipt.exists()
        yield third

    encoder = carry(orders(), 2)
    assert [[stem for stem, _ in batch] for batch in encoder.batches] == [["a", "b"], ["c", "d"]]
    counts = [read_receipt(each.receipt).counts["encoded"] for each in (first, second, third)]
    assert counts == [1, 2, 1]


def test_what_an_order_could_not_encode_is_refused_for_the_next() -> None:
    orders = [latents("a", on_error="skip"), latents("b", "c", on_error="skip")]
    Path("data/b.png").write_bytes(Path("data/a.png").read_bytes())
    zeros = Encoder(lambda sample, tensor: tensor * (sample.item.stem == "c"))
    carry_out(orders, say=silent, load=lambda _: Loaded(zeros, 1))
    faults = [[each["stem"] for each in read_receipt(x.receipt).faults] for x in orders]
    assert faults == [["a"], ["b"]] and sorted(zeros.stems) == ["a", "c"]
