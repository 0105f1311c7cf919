"""The store keeps the newest of what builds replaced, within its bound; it can be deleted."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from latentmake.plan import store


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def put(key: str, size: int = 10) -> Path:
    path = Path(f"cache-{key}")
    path.write_bytes(bytes(size))
    store.put_away(path, key)
    # The change time of a file tells since when it lies there, in ticks of the system's clock.
    clock = Path("clock")
    clock.touch()
    while clock.stat().st_ctime_ns <= store.stored(key).stat().st_ctime_ns:
        clock.touch()
    assert not path.exists()
    return store.stored(key)


def test_the_oldest_go_first_and_no_more_than_needed() -> None:
    for key in ("c", "a", "b"):
        put(key)
    os.utime(store.stored("a"), (1, 1))  # what was made long ago and replaced just now is new
    store.prune(30)
    assert store.keys() == {"a", "b", "c"}
    store.prune(29)
    assert store.keys() == {"b", "a"}
    store.prune(10)
    assert store.keys() == {"a"}
    store.prune(0)
    assert store.keys() == set()


def test_a_file_that_has_another_name_takes_nothing() -> None:
    put("alone")
    os.link(put("shared"), "cache")
    assert store.used() == 10
    store.prune(10)
    assert store.keys() == {"alone", "shared"}
    store.prune(5)
    assert store.keys() == {"shared"}
    store.forget_taken({str(store.stored("shared")), "cache", str(store.stored("gone"))})
    assert store.keys() == set() and Path("cache").exists()


def test_a_file_that_the_store_has_already_leaves_its_other_name() -> None:
    kept = put("key")
    os.link(kept, "cache")
    store.put_away(Path("cache"), "key")
    assert not Path("cache").exists() and kept.stat().st_nlink == 1


def test_what_the_store_cannot_take_is_deleted() -> None:
    Path(".latentmake").mkdir()
    store.STORE.write_text("in its place")
    path = Path("cache")
    path.write_bytes(b"x")
    store.put_away(path, "key")
    assert not path.exists()
    assert store.keys() == set() and store.used() == 0
    store.prune(0)


def test_no_store_is_an_empty_one() -> None:
    assert store.keys() == set() and store.used() == 0
    store.prune(0)
    store.put_away(Path("gone"), "key")
    assert store.keys() == set()
