"""Clips cut one after the other are those of all frames, whichever they are and overlap."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from latentmake.encode.pixels import scaling
from latentmake.encode.pixels.scaling import Cut, Film, cover, cut
from latentmake.formats.video import EndedError, read_frames
from latentmake.geometry.buckets import Size

COUNT = 30
FRAMES = np.random.default_rng(0).integers(0, 256, (COUNT, 18, 20, 3), dtype=np.uint8)
KEYS = [(size, size) for size in (Size(16, 16), Size(20, 18), Size(32, 16))]


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A clip of each length."""
    folder: Path = tmp_path_factory.mktemp("clips")
    for count in range(1, COUNT + 1):
        np.savez(folder / f"{count}.npz", FRAMES[:count])
    return [str(folder / f"{count}.npz") for count in range(COUNT + 1)]


@st.composite
def cuts(draw: st.DrawFn) -> list[Cut]:
    found = []
    for _ in range(draw(st.integers(1, 3))):
        stride, first = draw(st.integers(1, 3)), draw(st.integers(0, 5))
        kept = [*range(first, COUNT, stride)]
        if draw(st.booleans()):
            kept = [index for index in kept for _ in range(2)]  # each is shown twice
        for _ in range(draw(st.integers(1, 6))):
            frames = draw(st.integers(1, min(9, len(kept))))
            start = draw(st.integers(0, len(kept) - frames))
            keys = draw(st.sets(st.sampled_from(KEYS), min_size=1))
            found.append(Cut(kept, start, frames, [*keys]))
    return sorted(found, key=lambda each: each.reach)


@settings(deadline=None, max_examples=50)
@given(cuts())
def test_clips_are_those_of_all_frames_by_one_reading(clips: list[str], wanted: list[Cut]) -> None:
    read: list[list[int]] = []

    def noting(path: str, indices: Iterable[int]) -> Iterator[Any]:
        read.append([*indices])
        return read_frames(path, read[-1])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scaling, "read_frames", noting)
        for each, made in zip(wanted, cut(Film(clips[COUNT]), wanted), strict=True):
            assert made is not None and made.keys() == {*each.keys}
            for key, pixels in made.items():
                assert np.array_equal(pixels, [cover(FRAMES[x], key[0]) for x in each.indices])
    assert read == [sorted({index for each in wanted for index in each.indices})]


@settings(deadline=None, max_examples=30)
@given(cuts(), st.integers(1, COUNT - 1))
def test_the_last_frame_of_a_control_that_is_used_is_repeated(
    clips: list[str], wanted: list[Cut], end: int
) -> None:
    control = cut(Film(clips[end], bucket=False), wanted)
    for each in wanted:
        if each.kept[0] >= end:
            with pytest.raises(EndedError):
                next(control)
            return
        last = max(index for index in each.kept if index < end)
        for key, pixels in (next(control) or {}).items():
            shown = [min(index, last) for index in each.indices]
            assert np.array_equal(pixels, [cover(FRAMES[index], key[0]) for index in shown])
