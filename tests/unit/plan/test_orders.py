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
from item_world import work_of
from latentmake.config.datasets import Dataset
from latentmake.config.machines import MusubiTuner
from latentmake.config.models import Model
from latentmake.geometry.buckets import Size
from latentmake.geometry.clips import Clip, Media, Span
from latentmake.plan.batches import jobs_of
from latentmake.plan.orders import EncodingJob, Order, Target, Work
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


def work_order(**changes: Any) -> Order:
    target = Target("64", "cache/cats/tiny/64/a.latents.safetensors", None, Size(64, 64))
    values: dict[str, Any] = {
        "kind": "latents",
        "dataset": "cats",
        "model": "tiny",
        "dataset_settings": Dataset(path="data"),
        "model_settings": MODEL,
        "recipe": {"format": 1},
        "items": (work_of("a", "data/a.png", None, (target,)),),
    }
    return Order(**{**values, **changes})


def with_target(**changes: Any) -> Order:
    item = work_order().items[0]
    target = item.targets[0]._replace(**changes)
    return work_order(items=(item._replace(targets=(target,)),))


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


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
    found = [
        work_order(),
        work_order(kind="text"),
        work_order(dataset="dogs"),
        work_order(model="other"),
        work_order(dataset_settings=Dataset(path="data", on_error="skip")),
        work_order(model_settings=MODEL.model_copy(update={"dtype": "bfloat16"})),
        work_order(recipe={"format": 2}),
        work_order(recipe={}),
        with_target(found="key@1"),
        with_target(found="key@2"),
        with_target(found="other@1"),
        with_target(path="elsewhere"),
        with_target(size=(64, 96)),
    ]
    assert len({order.name for order in found}) == len(found)
    assert work_order().name == work_order().name


def test_a_written_order_is_newer_than_all_it_found() -> None:
    future = time.time_ns() + 3600 * 10**9
    found = Path("found")
    found.touch()
    os.utime(found, ns=(future, future))
    order = with_target(path="found", found=f"key@{future}")
    order.write()
    written = order.path.stat().st_mtime_ns
    assert found.stat().st_mtime_ns < written <= time.time_ns()
    Path("before").touch()  # the file system's clock lags behind time.time_ns
    order = with_target(found="key@5")
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
    assert order.path.stat().st_mtime_ns >= order.receipt.stat().st_mtime_ns
    order.receipt.unlink()
    order.path.write_text("{")
    order.write()
    assert Order.read(order.path) == order


# -- jobs -----------------------------------------------------------------------------------------

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
    assert job.rule.startswith("encode_text_cats_dogs_tiny_") and job.log.startswith(
        "logs/text/tiny/"
    )


def test_a_job_of_one_order_is_named_as_the_order() -> None:
    (job,) = jobs_of([(text_order("a"), A)], 1)
    assert job.rule == f"encode_text_cats_tiny_{job.orders[0].name[:12]}"
    assert job.log == f"logs/text/cats/{job.orders[0].name[:12]}.log"


@pytest.mark.parametrize(
    ("other", "runs"),
    [
        (text_order("b"), B),
        (text_order("b"), A | B),
        (text_order("b", model="other"), A),
        (order("latents", {"b": "b.png"}), A),
        (at_hand(text_order("b")), A),
        (text_order("b", musubi_tuner=MusubiTuner(path="tuner")), A),
    ],
    ids=["another run", "a further run", "model", "kind", "at hand", "external"],
)
def test_what_others_need_or_another_encoder_makes_is_another_job(
    other: Order, runs: frozenset[str]
) -> None:
    assert stems(jobs_of([(text_order("a"), A), (other, runs)], 1)) == [["a"], ["b"]]


def test_orders_of_an_external_encoder_stay_alone() -> None:
    tuner = MusubiTuner(path="tuner")
    orders = [(text_order(stem, musubi_tuner=tuner), A) for stem in "ab"]
    assert stems(jobs_of(orders, 1)) == [["a"], ["b"]]


def test_each_order_is_a_job_on_a_cluster() -> None:
    assert stems(jobs_of([(text_order(stem), A) for stem in "abc"], None)) == [["a"], ["b"], ["c"]]


def test_orders_are_dealt_to_all_gpus_by_their_sizes() -> None:
    orders = [(text_order(*each), A) for each in ("a", "b", "cdef", "gh")]
    dealt = stems(jobs_of(orders, 3))
    assert sorted(map(sorted, dealt)) == [["a", "b"], ["c", "d", "e", "f"], ["g", "h"]]
    assert len(jobs_of(orders, 8)) == 4


def test_the_order_of_the_largest_samples_decides_how_much_memory_is_needed() -> None:
    sizes = [order("latents", {part: f"{part}.png"}, parts=[part]) for part in ("16", "64", "32")]
    assert stems(jobs_of([(each, A) for each in sizes], 1)) == [["64", "32", "16"]]
