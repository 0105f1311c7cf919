"""The store keeps the newest of what builds replace, within its limit; it can be deleted."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from item_world import work_of
from latentmake.base import atomic
from latentmake.base.digest import TargetStat
from latentmake.config.datasets import Dataset
from latentmake.data.item import NO_FILE, Item, Scan
from latentmake.data.memo import Memo
from latentmake.formats import cachefile
from latentmake.plan import store
from latentmake.plan.judge import PartState, State
from latentmake.plan.orders import Order, Target, Work
from order_world import MODEL

pytestmark = pytest.mark.usefixtures("own_folder")


def put(key: str, size: int = 10) -> Path:
    path = Path(f"cache-{key}")
    path.write_bytes(bytes(size))
    store.put(path, key)
    # The change time of a file tells since when it lies there, in ticks of the system's clock.
    clock = Path("clock")
    clock.touch()
    while clock.stat().st_ctime_ns <= store.stored(key).stat().st_ctime_ns:
        clock.touch()
    assert not path.exists()
    return store.stored(key)


def make_order(*targets: Target) -> Order:
    items = (work_of("a", "a.png", None, targets),)
    return Order("latents", "cats", "small", Dataset(path="."), MODEL, {"a": 1}, items)


def make_cache(path: str, key: str) -> Target:
    """Write a cache file; return a target whose plan found it."""
    stamp = cachefile.stamp(key=key, source="s", recipe={"format": 1})
    atomic.write(Path(path), cachefile.serialize({"x": torch.ones(1)}, stamp))
    return Target("64", path, f"{key}@{Path(path).stat().st_mtime_ns}")


def test_the_oldest_go_first_and_no_more_than_needed() -> None:
    for key in ("c", "a", "b"):
        put(key)
    os.utime(store.stored("a"), (1, 1))  # what was made long ago and replaced just now is new
    store.limit(30)
    assert store.keys() == {"a", "b", "c"}
    store.limit(29)
    assert store.keys() == {"b", "a"}
    store.limit(10)
    assert store.keys() == {"a"}
    store.limit(0)
    assert store.keys() == set()


def test_a_file_that_has_another_name_takes_nothing() -> None:
    put("alone")
    os.link(put("shared"), "cache")
    store.stored(f".x{atomic.TEMPORARY_SUFFIX}").write_bytes(bytes(99))
    assert store.used() == 10
    store.limit(10)
    assert store.keys() >= {"alone", "shared"}
    store.limit(5)
    assert "shared" in store.keys() and "alone" not in store.keys()  # noqa: SIM118
    store.stored("somebody's folder").mkdir()
    store.limit(0)
    assert store.keys() == {"somebody's folder"} and Path("cache").exists()


def test_what_is_replaced_is_kept_until_the_store_is_limited() -> None:
    target = make_cache("cache/old", "key")
    damaged = make_cache("cache/broken", "other")._replace(found="x")
    damaged = damaged._replace(found=f"damaged@{Path(damaged.path).stat().st_mtime_ns}")
    old = Path(target.path).read_bytes()
    store.keep([make_order(target, damaged)])
    assert store.keys() == {"key"} and store.used() == 0
    Path(target.path).unlink()  # as Snakemake does before a job
    assert store.stored("key").read_bytes() == old
    assert store.used() == len(old)
    for found in (None, "old@5", "damaged@5"):  # another build has made it since
        store.keep([make_order(make_cache(f"cache/{found}", "new")._replace(found=found))])
        assert "new" in store.keys()  # noqa: SIM118
        store.stored("new").unlink()


def test_a_whole_file_takes_the_place_of_a_damaged_one() -> None:
    target = make_cache("cache/a", "key")
    put("key")
    store.keep([make_order(target)])
    assert store.holds(store.stored("key"), "key")
    inode = store.stored("key").stat().st_ino
    store.keep([make_order(make_cache("cache/b", "key"))])
    assert store.stored("key").stat().st_ino == inode  # a whole one stays


def test_a_header_is_read_again_only_after_a_change() -> None:
    make_cache("made", "key")
    moment = Path("made").stat().st_mtime_ns
    planned = Target("64", "made", f"of the plan@{moment}")
    assert store.present_key(planned) == "of the plan"
    assert store.present_key(planned._replace(found=f"damaged@{moment}")) == ""
    for found in (None, f"of the plan@{moment - 1}"):
        assert store.present_key(planned._replace(found=found)) == "key"
    assert store.present_key(planned._replace(path="gone")) == ""


def test_a_link_is_made_of_the_key_that_is_asked_for_or_not_at_all() -> None:
    make_cache("cache/a", "key")
    assert store.link(Path("cache/a"), Path("cache/deep/b"), "key")
    assert store.holds(Path("cache/deep/b"), "key") and not store.holds(Path("cache/b"), "x")
    assert not store.link(Path("cache/a"), Path("cache/c"), "other")
    assert not store.link(store.stored("gone"), Path("cache/c"), "gone")
    assert not Path("cache/c").exists()


SEEN = Scan("data", [("a.png", 1, 2, 3, 4)], "")
NOT_MOUNTED = Scan("data", [("drive", *NO_FILE)], "")


def lost(
    gone: int, of: int, apart: int = 0, scan: Scan = SEEN, linked: Sequence[str] = ()
) -> set[str]:
    """Return what is kept apart if some of the cache files of a dataset have no item."""
    folder = Path("cache/cats/tiny/64")
    paths = [str(folder / str(number)) for number in range(of)]
    with Memo(None) as memo:
        for number, path in enumerate(paths):
            stat = TargetStat(*[number] * 3)
            memo.targets.learn(path, stat, f"key {number}")
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            Path(path).touch()
        target = Target("64", "new", at_hand=(*linked,), reason="reusable")
        part = PartState(orphans=paths[:gone], gone=paths[:gone])
        part.stale = [Work(Item("new"), (target,))]
        waiting = {
            f"cache/cats/{store.KEPT}/{number}": f"apart {number}" for number in range(apart)
        }
        states = {("cats", "tiny"): State({"64": part})}
        found = store.vanished(memo, "cats", states, scan, waiting)
        assert found >= waiting.keys()
        return found - waiting.keys()


def test_a_build_keeps_the_caches_of_more_than_ten_and_more_than_a_tenth() -> None:
    assert not lost(10, of=10)
    assert len(lost(11, of=11)) == len(lost(11, of=109)) == 11
    assert not lost(11, of=110)
    assert len(lost(3, of=400, scan=NOT_MOUNTED)) == 3  # behind a link that leads nowhere


def test_no_series_of_builds_removes_what_one_may_not() -> None:
    assert not lost(8, of=40)
    assert len(lost(8, of=40, apart=8)) == 8  # a build that was killed had moved the others


def test_items_that_were_renamed_have_not_vanished() -> None:
    paths = [f"cache/cats/tiny/64/{number}" for number in range(20)]
    assert not lost(20, of=20, linked=paths)
    assert not lost(20, of=20, linked=paths[:10])
    assert len(lost(20, of=20, linked=paths[:9])) == 11


def test_what_is_kept_apart_is_found_by_its_key_and_keeps_its_name() -> None:
    path = Path(make_cache("cache/cats/tiny/64/sub/a.latents.safetensors", "key").path)
    store.keep_apart(path)
    kept = "cache/cats/.kept/tiny/64/sub/a.latents.safetensors"
    with Memo(None) as memo:
        assert store.kept_apart(memo, "cats") == {kept: "key"}
        assert [name for name, *_ in memo.targets.where("value", {"key"})] == [kept]
        assert store.kept_apart(memo, "dogs") == {}
    assert not path.exists() and not [*store.returned(["cats"])]
    make_cache(str(path), "key")
    assert [*store.returned(["cats", "dogs"])] == [kept]
