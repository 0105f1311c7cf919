"""Orders have names of their own, and share a job where they share encoder and runs."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from item_world import inputs_of, work_of
from latentmake.config.datasets import Dataset
from latentmake.config.machines import MusubiTuner
from latentmake.config.models import Model
from latentmake.geometry.buckets import Size
from latentmake.geometry.clips import Clip, Media, Span
from latentmake.plan.batches import jobs_of
from latentmake.plan.orders import EncodingJob, Order, Target, Work, place_of
from latentmake.plan.receipts import Receipt
from order_world import order

texts = st.text(st.characters(codec="utf-8"), min_size=1, max_size=8)
targets = st.builds(
    Target,
    part=st.sampled_from(["text", "64", "64x96"]),
    path=texts,
    found=st.one_of(st.none(), st.integers(0, 2**62).map(lambda mtime: f"key@{mtime}")),
    size=st.one_of(st.none(), st.tuples(st.integers(1), st.integers(1))),
    clip=st.one_of(st.none(), st.builds(Clip, st.integers(0, 99), st.integers(1, 99))),
)
work_items = st.builds(
    work_of,
    stem=texts,
    source=st.one_of(st.none(), texts),
    text=st.one_of(st.none(), texts),
    targets=st.lists(targets, max_size=3),
    controls=st.lists(texts, max_size=3).map(tuple),
    layers=st.lists(texts, max_size=2).map(tuple),
    control_sizes=st.lists(st.builds(Size, st.integers(1), st.integers(1)), max_size=2).map(tuple),
    image=st.none() | texts,
    media=st.one_of(st.none(), st.builds(Media, *[st.integers(0, 10**6)] * 3)),
    span=st.none() | st.builds(Span, st.integers(0, 9), st.none() | st.integers(1, 9)),
    content=st.one_of(st.none(), texts),
)


MODEL = Model(vae="vae", text=["text"])  # type: ignore[arg-type, list-item]


def work_order(part: dict[str, Any] | None = None, **changes: Any) -> Order:
    """Return an order with some changes, some of them to its only target."""
    target = Target("64", "cache/cats/tiny/64/a.latents.safetensors", None, Size(64, 64))
    work = work_of("a", "data/a.png", None, (target._replace(**part or {}),))
    made = Order("latents", "cats", "tiny", Dataset(path="data"), MODEL, {"format": 1}, (work,))
    return replace(made, **changes)


pytestmark = pytest.mark.usefixtures("own_folder")


@settings(deadline=None)
@given(st.lists(work_items, max_size=4).map(tuple))
def test_an_order_survives_being_written_and_read(items: tuple[Work, ...]) -> None:
    order = work_order(items=items)
    order.write()
    again = Order.read(order.path)
    assert again == order
    assert again.name == order.name
    order.path.unlink()


def test_whatever_an_order_asks_for_or_found_is_in_its_name() -> None:
    changes: list[dict[str, Any]] = [
        {"kind": "text"},
        {"dataset": "dogs"},
        {"model": "other"},
        {"dataset_settings": Dataset(path="data", on_error="skip")},
        {"model_settings": MODEL.model_copy(update={"dtype": "bfloat16"})},
        {"recipe": {"format": 2}},
        {"recipe": {}},
        {"part": {"found": "key@1"}},
        {"part": {"found": "key@2"}},
        {"part": {"found": "other@1"}},
        {"part": {"path": "elsewhere"}},
        {"part": {"size": (64, 96)}},
    ]
    names = {work_order(**change).name for change in [{}, *changes]}
    assert len(names) == len(changes) + 1 and work_order().name in names


def test_a_place_tells_spans_and_rows_of_one_file_apart() -> None:
    values: list[dict[str, Any]] = [{}, {"span": Span(8)}, {"row": {"x": 1}}]
    places = [place_of(inputs_of("a", "a.mp4", **each), work_order().layout) for each in values]
    assert places[0] == "a.mp4" and len({*places}) == 3


def test_a_written_order_is_newer_than_all_it_found() -> None:
    future = time.time_ns() + 3600 * 10**9
    found = Path("found")
    found.touch()
    os.utime(found, ns=(future, future))
    order = work_order({"path": "found", "found": f"key@{future}"})
    order.write()
    written = order.path.stat().st_mtime_ns
    assert found.stat().st_mtime_ns < written <= time.time_ns()
    Path("before").touch()  # the file system's clock lags behind time.time_ns
    order = work_order({"found": "key@5"})
    order.write()
    assert order.path.stat().st_mtime_ns >= Path("before").stat().st_mtime_ns


def test_planning_again_leaves_an_order_alone_until_it_is_done() -> None:
    order = work_order()
    order.write()
    os.utime(order.path, ns=(before := time.time_ns() - 10**12, before))
    order.write()
    assert order.path.stat().st_mtime_ns == before  # a build may be carrying it out
    Receipt({}, {}, [], {}, 0.0).write(order.receipt)
    order.write()
    assert order.path.stat().st_mtime_ns > before and not order.receipt.exists()
    order.path.write_text("{")
    order.write()
    assert Order.read(order.path) == order


A, B = frozenset("a"), frozenset("b")


def text_order(*stems: str, **changes: Any) -> Order:
    made = order("text", {stem: f"caption of {stem}" for stem in stems})
    return replace(made, **changes)


def at_hand(work: Order) -> Order:
    items = [
        item._replace(targets=tuple(each._replace(at_hand=("x",)) for each in item.targets))
        for item in work.items
    ]
    return replace(work, items=tuple(items))


def stems(jobs: list[EncodingJob]) -> list[list[str]]:
    return [[work.item.stem for each in job.orders for work in each.items] for job in jobs]


def test_orders_of_one_model_and_the_same_runs_are_one_job() -> None:
    one, other = text_order("a", "b"), text_order("c", dataset="dogs")
    (job,) = jobs_of([(one, A | B), (other, A | B)], 1)
    assert job.orders == (one, other)
    assert job.receipts == [str(one.receipt), str(other.receipt)]
    assert job.rule.startswith("encode_text_cats_dogs_tiny_")
    assert job.log.startswith("logs/text/tiny/")
    (job,) = jobs_of([(one, A)], 1)
    assert job.rule == f"encode_text_cats_tiny_{one.name[:12]}"
    assert job.log == f"logs/text/cats/{one.name[:12]}.log"


TUNER = MusubiTuner(path="tuner")
OTHERS: dict[str, tuple[Order, Order, frozenset[str], int | None]] = {
    "another run": (text_order("a"), text_order("b"), B, 1),
    "a further run": (text_order("a"), text_order("b"), A | B, 1),
    "model": (text_order("a"), text_order("b", model="other"), A, 1),
    "kind": (text_order("a"), order("latents", {"b": "b.png"}), A, 1),
    "at hand": (text_order("a"), at_hand(text_order("b")), A, 1),
    "external": (text_order("a"), text_order("b", musubi_tuner=TUNER), A, 1),
    "both external": (
        text_order("a", musubi_tuner=TUNER), text_order("b", musubi_tuner=TUNER), A, 1
    ),
    "on a cluster": (text_order("a"), text_order("b"), A, None),
}  # fmt: skip


@pytest.mark.parametrize(("one", "other", "runs", "jobs"), OTHERS.values(), ids=OTHERS)
def test_what_others_need_or_another_encoder_makes_is_another_job(
    one: Order, other: Order, runs: frozenset[str], jobs: int | None
) -> None:
    assert stems(jobs_of([(one, A), (other, runs)], jobs)) == [["a"], ["b"]]


def test_orders_are_dealt_to_all_gpus_by_their_sizes() -> None:
    orders = [(text_order(*each), A) for each in ("a", "b", "cdef", "gh")]
    dealt = stems(jobs_of(orders, 3))
    assert sorted(map(sorted, dealt)) == [["a", "b"], ["c", "d", "e", "f"], ["g", "h"]]
    assert len(jobs_of(orders, 8)) == 4


def test_the_order_of_the_largest_samples_decides_how_much_memory_is_needed() -> None:
    sizes = [order("latents", {part: f"{part}.png"}, parts=[part]) for part in ("16", "64", "32")]
    assert stems(jobs_of([(each, A) for each in sizes], 1)) == [["64", "32", "16"]]
