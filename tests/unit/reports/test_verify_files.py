"""Reading of many files by several threads."""

from __future__ import annotations

import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from latentmake.reports import verify_files
from latentmake.reports.verify_files import Content, Reading, read_all


@given(
    st.lists(st.sampled_from([0, 1, 5_000, 300_000, 4 << 20, 40 << 20]), max_size=700),
    st.integers(1, 4),
)
def test_each_file_is_read_once_in_order(sizes: list[int], threads: int) -> None:
    files = [Reading(str(number), size) for number, size in enumerate(sizes)]
    asked: list[str] = []

    def read(file: Reading) -> Content:
        asked.append(file.path)
        return Content(file.path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verify_files, "read", read)
        found = list(read_all(files, threads))
    assert found == [(number, Content(file.path)) for number, file in enumerate(files)]
    assert sorted(asked, key=int) == [file.path for file in files]


@pytest.mark.parametrize("waits", [True, False], ids=["for files", "for other threads"])
def test_how_files_are_read_is_what_was_faster(
    waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    meet = threading.Barrier(3, timeout=60)
    lock, most = threading.Lock(), 0
    active: set[str] = set()

    def read(file: Reading) -> Content:
        nonlocal most
        number = int(file.path)
        with lock:
            active.add(file.path)
            most = max(most, len(active) if number > 3 else 0)
        if number == 0 and waits:
            time.sleep(0.2)
        elif 0 < number <= 3 or waits:  # three threads at once
            meet.wait()
            time.sleep(0.0 if waits else 0.2)
        with lock:
            active.discard(file.path)
        return Content()

    monkeypatch.setattr(verify_files, "read", read)
    monkeypatch.setattr(verify_files, "_MOST", 1)
    files = [Reading(str(number), 1000) for number in range(10)]
    assert len(list(read_all(files, 3))) == 10
    assert most == (3 if waits else 1)
