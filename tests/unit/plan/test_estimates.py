"""Past jobs tell time and bytes of the next ones."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from item_world import work_of
from latentmake.base.machine import Need, shortages
from latentmake.config.datasets import Dataset
from latentmake.config.machines import Cluster
from latentmake.config.models import Model
from latentmake.config.root import parse
from latentmake.data.memo import Memo
from latentmake.geometry.buckets import Size
from latentmake.geometry.clips import Clip
from latentmake.pages.plan_report import (
    by_work,
    disk_needs,
    estimate_lines,
    estimates,
    ordered,
)
from latentmake.plan.estimates import (
    Past,
    learn_job,
    past_jobs,
    resources_of,
)
from latentmake.plan.facts import Facts
from latentmake.plan.orders import Order, Target
from latentmake.plan.planner import make_plan
from latentmake.plan.receipts import Receipt, learn_receipts

TINY = {"vae": "vae", "text": ["text"]}
RUN = {"datasets": ["cats"], "model": "tiny", "resolutions": [64]}
CONFIG = {"datasets": {"cats": {"path": "data"}}, "models": {"tiny": TINY}, "runs": {"a": RUN}}
VAE = {"block_out_channels": [8, 8], "latent_channels": 4}


pytestmark = pytest.mark.usefixtures("own_folder")


def order_of(
    kind: str = "latents", count: int = 100, clip: Clip | None = None, **keys: Any
) -> Order:
    size = Size(96, 64) if kind == "latents" else None
    part = "64x96" if size else "text"
    targets = [(Target(part, f"cache/{n}", None, size, clip),) for n in range(count)]
    items = tuple(work_of(str(n), f"{n}", None, each) for n, each in enumerate(targets))
    model = Model.model_validate(TINY | keys)
    return Order(kind, "cats", "tiny", Dataset(path="data"), model, {"format": 1}, items)


def receipt_of(order: Order, seconds: float, **others: Any) -> dict[str, Any]:
    """A job that started in 60 s, encoded half of the targets and linked the others to these."""
    count = len(order.paths)
    counts = {"encoded": count // 2, "linked": count // 2, "kept": 7}
    targets = {path: [1000, 1, 2, "key"] for path in order.paths}
    values = {"starting": 60.0, "work": order.work}
    receipt = Receipt({}, targets, [], counts, seconds + 60.0, **(values | others))
    return vars(receipt)


def learnt(*receipts: dict[str, Any]) -> Memo:
    memo, folder = Memo(None), Path(".latentmake/orders")
    folder.mkdir(parents=True, exist_ok=True)
    for number, receipt in enumerate(receipts):
        (folder / f"{number}.receipt.json").write_text(json.dumps(receipt))
    learn_receipts(memo)
    return memo


def lines(memo: Memo, orders: list[Order]) -> Iterator[str]:
    facts = Facts(parse(CONFIG), memo)
    return estimate_lines(facts, by_work(facts, ordered(orders)))


def needs(memo: Memo, orders: list[Order]) -> list[Need]:
    return disk_needs(by_work(Facts(parse(CONFIG), memo), ordered(orders)))


def test_each_job_counts_twice_as_much_as_the_one_before() -> None:
    memo = Memo(None)
    learn_job(memo, "text tiny", Past(100, 10.0, 1000.0, 8.0, "bottleneck: reading"))
    learn_job(memo, "text tiny", Past(0, 5.0, 9.0, 99.0))  # it encoded nothing
    learn_job(memo, "text tiny", Past(100, 40.0, 4000.0))  # short, and in a process that had begun
    sums = Past(150, 45.0, 4500.0, 8.0, "bottleneck: reading", jobs=2)
    assert past_jobs(memo, "text tiny") == sums
    other = Past(10, 1.0, 100.0, device="cpu float32")  # of another device, so the sums begin anew
    learn_job(memo, "text tiny", other)
    assert past_jobs(memo, "text tiny") == other._replace(jobs=1)
    assert past_jobs(memo, "latents tiny") is None


def test_receipts_tell_time_and_bytes_even_those_with_keys_of_other_versions() -> None:
    assert not [*lines(Memo(None), [order_of("text")])]
    memo = learnt(receipt_of(order_of("text"), 240.0) | {"amount": 5100.0, "new": None})
    assert [*lines(memo, [order_of("text", 200)])] == ["text of tiny: about 9 min, 0.1 MB"]
    two = [order_of("text"), replace(order_of("text"), dataset="dogs")]
    assert [*lines(memo, two)] == ["text of tiny: about 9 min, 0.1 MB"]
    assert needs(memo, two) == [Need("text of tiny", "cache", 100_000)]
    linked = two[0].items[0]._replace(targets=(Target("text", "x", None, at_hand=("y",)),))
    assert not needs(memo, [replace(two[0], items=(linked,))])
    facts = Facts(parse(CONFIG), memo)
    found = estimates(facts, ordered(two), lambda part: (part.dataset, part.name))
    assert found == {(each, "text"): Past(100, 240.0, 50_000) for each in ("cats", "dogs")}


def test_latents_are_estimated_by_their_pixels() -> None:
    order = order_of()
    size = sum(target.pixels for target in order.targets)
    assert size == 100 * 96 * 64
    memo = learnt(receipt_of(order, 240.0, pixels=size))
    assert [*lines(memo, [order])] == ["latents of tiny: about 5 min, 50.0 kB"]

    def larger(target: Target) -> Target:
        return target._replace(part="128x192", size=Size(192, 128))

    items = tuple(x._replace(targets=tuple(map(larger, x.targets))) for x in order.items)
    four = replace(order, items=items)
    assert [*lines(memo, [four])] == ["latents of tiny: about 17 min, 0.2 MB"]
    # Receipts of earlier releases tell no pixels, and these go by the number of targets.
    assert [*lines(learnt(receipt_of(order, 240.0)), [four])] == [
        "latents of tiny: about 5 min, 50.0 kB"
    ]


def test_bytes_are_known_before_any_job_where_the_files_of_the_encoders_say_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """tests/unit/pages/test_cache_bytes.py compares them with written files."""
    monkeypatch.setattr(Facts, "recipe", lambda *_: {"dtype": "float32"})
    order, texts = order_of(), order_of("text", 2)
    assert not [*lines(Memo(None), [order])]
    Path("vae").mkdir()
    Path("vae/config.json").write_text(json.dumps(VAE))
    assert [*lines(Memo(None), [order])] == ["latents of tiny: about 2.5 MB"]
    Path("text").mkdir()
    clip = {"model_type": "clip_text_model", "hidden_size": 768, "max_position_embeddings": 77}
    Path("text/config.json").write_text(json.dumps(clip))
    assert [*lines(Memo(None), [texts])] == ["text of tiny: about 0.2 MB"]  # equal captions
    Path("text/config.json").write_text(json.dumps({"model_type": "t5", "d_model": 4096}))
    assert not [*lines(Memo(None), [texts])]  # a T5 without a tokenizer


def test_a_first_build_that_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Facts, "recipe", lambda *_: {"dtype": "float32"})
    monkeypatch.setattr("latentmake.base.machine.free", lambda _: 2_000_000)
    Path("vae").mkdir()
    Path("vae/config.json").write_text(json.dumps(VAE))
    (error,) = shortages(needs(Memo(None), [order_of()]))
    assert "2.5 MB of latents of tiny must be written, but only 2.0 MB is free" in str(error)
    assert not [*shortages(needs(Memo(None), [order_of(count=50)]))]


def test_bytes_of_another_recipe_do_not_follow_from_past_jobs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Facts, "recipe", lambda *_: {"dtype": "float32"})
    memo, order = Memo(None), order_of()
    learn_job(memo, order.work, Past(100, 60.0, 1e9, pixels=100 * 96 * 64))
    assert needs(memo, [order])[0].size == 1_000_000_000
    Path("vae").mkdir()
    Path("vae/config.json").write_text(json.dumps(VAE))
    works = [
        work._replace(targets=tuple(t._replace(reason="changed recipe") for t in work.targets))
        for work in order.items
    ]
    assert needs(memo, [replace(order, items=tuple(works))])[0].size < 3_000_000


def test_a_job_on_a_cluster_gets_twice_the_expected_time() -> None:
    cluster = Cluster.model_validate({"encode": {"runtime": 10}})
    orders = [order_of("text"), order_of("text")]
    for memo, kind, minutes in (
        (None, "encode", 10 + 2 * 200 * 2 / 60),
        (learnt(receipt_of(orders[0], 240.0)), "encode", 10 + 2 * (1 + 8)),
        (None, "train", cluster.train.runtime),
    ):
        found = resources_of(cluster, kind, orders, memo)
        limit: Any = found["runtime"]
        assert limit(None, 1) == pytest.approx(minutes, abs=1)
        assert limit(None, 2) == pytest.approx(2 * minutes, abs=1)
        assert "slurm_account" not in found


def test_batches_are_as_large_as_past_jobs_allow() -> None:
    Path("data").mkdir()
    for number in range(32):
        Path(f"data/{number}.png").write_text(f"{number}")
        Path(f"data/{number}.txt").write_text("a cat")
    run = {"datasets": "cats", "model": "tiny", "resolutions": [64, 96]}
    batch = {"items": "auto", "minutes": 0.5}
    values = {"datasets": {"cats": {"path": "data"}}, "models": {"tiny": TINY}}
    memo = Memo(None)
    learn_job(memo, "latents tiny", Past(10, 10.0, starting=1.0))  # 29 targets in 30 s
    facts = Facts(parse({**values, "runs": {"a": run}, "batch": batch}), memo, encoders=False)
    orders = make_plan(facts, ["a"]).orders
    assert [len(x.items) for x in orders if x.kind == "latents"] == [14, 14, 4]
