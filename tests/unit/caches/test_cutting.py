"""Clips cut one after the other are those of all frames, whichever they are and overlap."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from latentmake.caches.pixels.cutting import Array, Cut, Cutter
from latentmake.files.frames import EndedError
from latentmake.files.frames.reading import read_frames

COUNT = 30
FRAMES = np.random.default_rng(0).integers(0, 256, (COUNT, 2, 3, 3), dtype=np.uint8)


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> str:
    path: Path = tmp_path_factory.mktemp("clips") / "a.npz"
    np.savez(path, FRAMES)
    return str(path)


@st.composite
def cuts(draw: st.DrawFn) -> list[Cut[int]]:
    found = []
    for _ in range(draw(st.integers(1, 3))):
        stride, first = draw(st.integers(1, 3)), draw(st.integers(0, 5))
        kept = [*range(first, COUNT, stride)]
        if draw(st.booleans()):
            kept = [index for index in kept for _ in range(2)]  # each is shown twice
        for _ in range(draw(st.integers(1, 6))):
            frames = draw(st.integers(1, min(9, len(kept))))
            start = draw(st.integers(0, len(kept) - frames))
            keys = draw(st.sets(st.integers(1, 3), min_size=1))
            found.append(Cut(kept, start, frames, tuple(keys)))
    return sorted(found, key=lambda cut: cut.reach)


def scaled(frame: Array, key: int) -> Array:
    return np.repeat(frame, key, axis=0) // np.uint8(key)


@settings(deadline=None, max_examples=150)
@given(cuts())
def test_clips_are_those_of_all_frames(clip: str, wanted: list[Cut[int]]) -> None:
    read: list[list[int]] = []

    def frames_at(path: str, indices: Sequence[int]) -> Iterator[tuple[int, Array]]:
        read.append([*indices])
        return read_frames(path, indices)

    cutter = Cutter(clip, wanted, scaled, frames_at)
    for cut in wanted:
        made = cutter.cut()
        assert made.keys() == {*cut.keys}
        for key, pixels in made.items():
            assert np.array_equal(pixels, [scaled(FRAMES[index], key) for index in cut.indices])
    assert not cutter.holds_another
    assert all(one < other for indices in read for one, other in pairwise(indices))


@settings(deadline=None, max_examples=60)
@given(cuts(), st.integers(1, COUNT - 1))
def test_the_last_frame_in_use_is_repeated_where_that_is_wanted(
    clip: str, wanted: list[Cut[int]], end: int
) -> None:
    def frames_at(path: str, indices: Sequence[int]) -> Iterator[tuple[int, Array]]:
        """Read a file of `end` frames."""
        yield from read_frames(path, [index for index in indices if index < end])
        for index in indices:
            if index >= end:
                raise EndedError(path, end, index)

    cutter = Cutter(clip, wanted, scaled, frames_at, repeats_last=True)
    for cut in wanted:
        if cut.kept[0] >= end:
            with pytest.raises(EndedError):
                cutter.cut()
            return
        last = max(index for index in cut.kept if index < end)
        for key, pixels in cutter.cut().items():
            shown = [min(index, last) for index in cut.indices]
            assert np.array_equal(pixels, [scaled(FRAMES[index], key) for index in shown])


def test_a_slide_reads_each_frame_once(clip: str) -> None:
    read: list[int] = []

    def frames_at(path: str, indices: Sequence[int]) -> Iterator[tuple[int, Array]]:
        read.extend(indices)
        return read_frames(path, indices)

    wanted = [Cut(range(COUNT), start, length, (1,)) for start in range(20) for length in (1, 5, 9)]
    cutter = Cutter(clip, wanted, scaled, frames_at)
    for _ in wanted:
        cutter.cut()
    assert read == [*range(28)]
