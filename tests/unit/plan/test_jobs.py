"""Orders share a job only where they share an encoder and the runs that wait for them."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from latentmake.config.machines import MusubiTuner
from latentmake.plan.orders import EncodingJob, Order, jobs_of
from order_world import order

A, B = frozenset("a"), frozenset("b")


def texts(*stems: str, **changes: Any) -> Order:
    made = order("text", {stem: f"caption of {stem}" for stem in stems})
    return dataclasses.replace(made, **changes)


def at_hand(work: Order) -> Order:
    items = [
        item._replace(targets=tuple(each._replace(at_hand=("x",)) for each in item.targets))
        for item in work.items
    ]
    return dataclasses.replace(work, items=tuple(items))


def stems(jobs: list[EncodingJob]) -> list[list[str]]:
    return [[work.item.stem for each in job.orders for work in each.items] for job in jobs]


def test_orders_of_one_model_and_the_same_runs_are_one_job() -> None:
    one, other = texts("a", "b"), texts("c", dataset="dogs")
    (job,) = jobs_of([(one, A | B), (other, A | B)], 1)
    assert job.orders == (one, other)
    assert job.receipts == [str(one.receipt), str(other.receipt)]
    assert job.rule.startswith("encode_text_tiny_") and job.log.startswith("logs/text/tiny/")


def test_a_job_of_one_order_is_named_as_the_order() -> None:
    (job,) = jobs_of([(texts("a"), A)], 1)
    assert job.rule == f"encode_text_cats_{job.orders[0].name[:12]}"
    assert job.log == job.orders[0].log


@pytest.mark.parametrize(
    ("other", "runs"),
    [
        (texts("b"), B),
        (texts("b"), A | B),
        (texts("b", model="other"), A),
        (order("latents", {"b": "b.png"}), A),
        (at_hand(texts("b")), A),
        (texts("b", musubi_tuner=MusubiTuner(path="tuner")), A),
    ],
    ids=["another run", "a further run", "model", "kind", "at hand", "external"],
)
def test_what_others_need_or_another_encoder_makes_is_another_job(
    other: Order, runs: frozenset[str]
) -> None:
    assert stems(jobs_of([(texts("a"), A), (other, runs)], 1)) == [["a"], ["b"]]


def test_orders_of_an_external_encoder_stay_alone() -> None:
    tuner = MusubiTuner(path="tuner")
    orders = [(texts(stem, musubi_tuner=tuner), A) for stem in "ab"]
    assert stems(jobs_of(orders, 1)) == [["a"], ["b"]]


def test_each_order_is_a_job_on_a_cluster() -> None:
    assert stems(jobs_of([(texts(stem), A) for stem in "abc"], None)) == [["a"], ["b"], ["c"]]


def test_orders_are_dealt_to_all_gpus_by_their_sizes() -> None:
    orders = [(texts(*each), A) for each in ("a", "b", "cdef", "gh")]
    dealt = stems(jobs_of(orders, 3))
    assert sorted(map(sorted, dealt)) == [["a", "b"], ["c", "d", "e", "f"], ["g", "h"]]
    assert len(jobs_of(orders, 8)) == 4


def test_the_order_of_the_largest_samples_decides_how_much_memory_is_needed() -> None:
    sizes = [order("latents", {part: f"{part}.png"}, parts=[part]) for part in ("16", "64", "32")]
    assert stems(jobs_of([(each, A) for each in sizes], 1)) == [["64", "32", "16"]]
