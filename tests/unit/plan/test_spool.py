"""What builds replace is kept, and counts for the store once a build has ended well."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from latentmake.plan import spool, store


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def replaced(key: str) -> Path:
    """Leave a file as a build does that was killed after it replaced it."""
    spool.SPOOL.mkdir(parents=True, exist_ok=True)
    spool.spooled(key).write_bytes(bytes(10))
    return spool.spooled(key)


def test_what_a_killed_build_replaced_counts_for_the_store() -> None:
    for number in range(20):
        replaced(f"k{number:02}")
    os.link(replaced("made"), "cache")  # the next build delivered it
    folder = spool.SPOOL / "mine"
    folder.mkdir()
    spool.end(spool.begin([]), [], keep=50)
    assert [*spool.SPOOL.iterdir()] == [folder]
    assert len(store.keys()) == 5 and store.used() == 50


def test_what_a_build_replaced_stays_while_another_one_runs() -> None:
    left = replaced("k")
    first, second = spool.begin([]), spool.begin([])
    spool.end(first, [], keep=50)
    assert left.exists()
    assert second is not None
    second.close()
    spool.end(first, [], keep=50)
    assert store.keys() == {"k"} and not left.exists()
