"""An order survives being written and read, and no two different ones share a name."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from item_world import work_of
from latentmake.config.datasets import Dataset
from latentmake.config.models import Model
from latentmake.files import atomic, cachefile
from latentmake.geometry.buckets import Size
from latentmake.geometry.clips import Clip, Media, Span
from latentmake.plan import receipts, spool
from latentmake.plan.orders import FOLDER, Order, Work
from latentmake.plan.receipts import Receipt, read_receipt
from latentmake.plan.target import Target

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


def test_an_order_whose_items_have_nothing_but_files_yet_is_read() -> None:
    order = work_order()
    order.write()
    path = order.path.with_suffix(".items.json")
    path.write_text(json.dumps([(each.item[:2], each.targets) for each in order.items]))
    assert Order.read(order.path) == order


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
    order = with_target(found=f"key@{future}")
    order.write()
    assert order.path.stat().st_mtime_ns > future
    Path("before").touch()  # the file system's clock lags behind time.time_ns
    order = with_target(found="key@5")
    order.write()
    assert order.path.stat().st_mtime_ns >= Path("before").stat().st_mtime_ns


def test_orders_and_receipts_are_told_apart_on_disk() -> None:
    assert list(receipts.receipts()) == []
    written = [work_order(), work_order(kind="text")]
    for order in written:
        order.write()
    Receipt({}, {}, [], {}, 0.0).write(written[0].receipt)
    assert list(receipts.receipts()) == [written[0].receipt]


def test_a_receipt_survives_being_written_and_read() -> None:
    receipt = Receipt(
        {"a": [1, 2, 3, 4, "d"]}, {"b": [1, 2, 3, "k"]}, [{"stem": "é"}], {"x": 1}, 2.5
    )
    receipt.write(Path("sub/receipt.json"))
    assert read_receipt(Path("sub/receipt.json")) == receipt


@pytest.mark.parametrize("text", ["", "{", "{}", '{"targets": {}}', '{"else": 1}'])
def test_a_damaged_receipt_is_a_value_error(text: str) -> None:
    Path("receipt.json").write_text(text)
    with pytest.raises(ValueError, match=r"."):
        read_receipt(Path("receipt.json"))


def test_old_orders_and_delivered_spool_files_are_forgotten_and_no_others() -> None:
    kept, old, new = work_order(), work_order(kind="text"), work_order(dataset="dogs")
    for order in (kept, old, new):
        order.write()
        Receipt({}, {}, [], {}, 0.0).write(order.receipt)
    week = time.time() - 8 * 24 * 3600
    for order in (kept, old):
        os.utime(order.path, (week, week))
        os.utime(order.receipt, (week, week))
    spool("x").parent.mkdir(parents=True)
    for key in ("waiting", "delivered"):
        spool(key).write_bytes(b"x")
    os.link(spool("delivered"), "target")
    os.utime(spool("waiting"), (week, week))  # made long ago, but it lies there since today
    spool.forget_old({kept.name})
    assert not old.path.exists() and kept.path.exists() and new.path.exists()
    assert set(receipts.receipts()) == {kept.receipt, new.receipt}
    assert [path.name for path in spool("x").parent.iterdir()] == [spool("waiting").name]
    assert Path("target").read_bytes() == b"x"


def test_what_nobody_fetched_from_the_spool_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    spool("x").parent.mkdir(parents=True)
    spool("given up").write_bytes(b"x")
    spool("a folder of somebody's").mkdir()
    monkeypatch.setattr(spool, "KEPT_SECONDS", -1)
    spool.forget_old(set())
    assert not spool("given up").exists()


def test_what_is_replaced_is_kept_in_the_spool_until_then() -> None:
    target = Target("64", "cache/old", "key@5", Size(64, 64))
    damaged = Target("64", "cache/broken", "damaged@5", Size(64, 64))
    for each in (target, damaged):
        Path(each.path).parent.mkdir(exist_ok=True)
        Path(each.path).write_bytes(b"old")
        os.utime(each.path, ns=(5, 5))
    order = work_order(items=(work_of("a", "data/a.png", None, (target, damaged)),))
    spool.keep_replaced([order])
    Path(target.path).unlink()  # as Snakemake does before a job
    spool.forget_old({order.name})
    assert spool("key").read_bytes() == b"old"
    assert len(list(spool("key").parent.iterdir())) == 1


def test_what_another_build_has_made_since_is_kept_under_its_own_key() -> None:
    recipe = {"format": 1}
    stamp = cachefile.stamp(key="new", source="s", recipe=recipe)
    data = cachefile.serialize({"x": torch.ones(1)}, stamp)
    found = [None, "old@5", "damaged@5"]
    targets = [Target("64", f"cache/{each}", each, (64, 64)) for each in found]
    for target in targets:
        atomic.write(Path(target.path), data)
    for target in targets:
        spool.keep_replaced([work_order(items=(work_of("a", "a.png", None, (target,)),))])
        assert [path.name for path in spool("x").parent.iterdir()] == [spool("new").name]
        spool("new").unlink()


def test_beside_another_build_nothing_is_tidied_away() -> None:
    spool("x").parent.mkdir(parents=True)
    spool("kept").write_bytes(b"x")
    os.link(spool("kept"), "target")  # as a build keeps what it replaces
    builds = [spool.begin([])]
    assert not spool("kept").exists()
    os.link("target", spool("kept"))
    builds += [spool.begin([]), spool.begin([])]
    assert spool("kept").exists()
    for build in builds:
        assert build is not None
        build.close()
    build = spool.begin([])
    assert not spool("kept").exists()


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


def test_forgetting_what_is_not_there_does_nothing() -> None:
    spool.forget_old(set())
    spool.forget_delivered()


@settings(deadline=None)
@given(st.text("abc/.", min_size=1, max_size=9))
def test_names_of_files_and_logs_are_those_of_the_order(dataset: str) -> None:
    order = work_order(dataset=dataset)
    assert order.name[:12] in order.log
    assert order.path.parent == order.receipt.parent == FOLDER
