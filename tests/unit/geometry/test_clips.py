"""Which clips a video gives, against a second reading of musubi-tuner's rules, with numpy."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from latentmake.config.datasets import Dataset
from latentmake.geometry.clips import clips, kept_indices

ROOT = Path(__file__).resolve().parents[3]
rates = st.one_of(
    st.none(),
    st.sampled_from([8.0, 12.0, 15.0, 16.0, 23.976, 24.0, 25.0, 29.97, 30.0, 50.0, 59.94, 60.0]),
    st.floats(0.5, 1000),
)


def found(count: int, **changes: Any) -> list[tuple[int, int]]:
    cut = clips(count, Dataset.model_construct(**{"target_frames": [5, 9], **changes}))
    return [(clip.start, clip.frames) for clip in cut]


# -- a second reading of the rules ----------------------------------------------------------------


def loaded(count: int, source_fps: float | None, end: int | None) -> list[int]:
    """Numbers of the frames that the loader returns, reading one after the other up to an end."""
    taken: list[int] = []
    clock, shown = np.float64(0), -1
    for number in range(count):
        now = number if source_fps is None else int(clock)
        clock += np.float64(16) / np.float64(source_fps or 16)
        if now == shown:
            continue
        shown = now
        if end is not None and now >= end:
            break
        taken.append(number)
    return taken


def crops(count: int, each: dict[str, Any]) -> list[tuple[int, int]]:
    """The pairs of position and length that the data set cuts, doubles included."""
    sizes = np.unique([(size - 1) // 4 * 4 + 1 for size in each["target_frames"]]).tolist()
    way = each["frame_extraction"]
    head = way == "head" or (way == "uniform" and each["frame_sample"] == 1)
    have = len(loaded(count, each["source_fps"], max(sizes) if head else None))
    if have == 0:
        return []
    if way == "full":
        most = min(have, each["max_frames"])
        return [(0, max(size for size in range(1, most + 1) if size % 4 == 1))]
    pairs: list[tuple[int, int]] = []
    for size in sizes:
        room = have - size
        if room < 0:
            continue
        if head:
            at = np.array([0])
        elif way == "chunk":
            at = np.arange(have // size) * size
        elif way == "slide":
            at = np.arange(0, room + 1, each["frame_stride"])
        else:
            at = np.linspace(0, room, each["frame_sample"], dtype=int)
        pairs += [(int(start), size) for start in at]
    return pairs


@st.composite
def choices(draw: st.DrawFn) -> dict[str, Any]:
    return {
        "target_frames": draw(st.lists(st.integers(1, 90), min_size=1, max_size=3)),
        "frame_extraction": draw(st.sampled_from(["head", "chunk", "slide", "uniform", "full"])),
        "frame_stride": draw(st.integers(1, 40)),
        "frame_sample": draw(st.integers(1, 30)),
        "max_frames": draw(st.integers(1, 140)),
        "source_fps": draw(rates),
    }


@settings(deadline=None, max_examples=400)
@given(st.integers(0, 400), choices())
def test_clips_are_those_of_the_rules(count: int, each: dict[str, Any]) -> None:
    assert found(count, **each) == list(dict.fromkeys(crops(count, each)))


@settings(deadline=None, max_examples=300)
@given(st.integers(0, 100_000), st.integers(2, 2000))
def test_uniform_clips_begin_where_linspace_says(room: int, number: int) -> None:
    starts = [
        start
        for start, _ in found(
            room + 5, target_frames=[5], frame_extraction="uniform", frame_sample=number
        )
    ]
    assert starts == list(dict.fromkeys(np.linspace(0, room, number, dtype=int).tolist()))


@settings(deadline=None)
@given(st.integers(0, 2000), rates)
def test_kept_frames_are_those_of_the_rules(count: int, fps: float | None) -> None:
    kept = kept_indices(count, fps)
    assert [index for index, _ in kept] == loaded(count, fps, None)
    for (_, before), (_, after) in pairwise(kept):
        assert before < after


# -- worked by hand -------------------------------------------------------------------------------


def test_each_way_of_cutting() -> None:
    assert found(12) == [(0, 5), (0, 9)]
    assert found(8) == [(0, 5)]
    assert found(12, frame_extraction="chunk") == [(0, 5), (5, 5), (0, 9)]
    assert found(11, frame_extraction="slide", frame_stride=3) == [(0, 5), (3, 5), (6, 5), (0, 9)]
    uniform = found(12, frame_extraction="uniform", frame_sample=3)
    assert uniform == [(0, 5), (3, 5), (7, 5), (0, 9), (1, 9), (3, 9)]
    assert found(12, frame_extraction="full") == [(0, 9)]
    assert found(12, frame_extraction="full", max_frames=8) == [(0, 5)]
    assert found(3, frame_extraction="full") == [(0, 1)]
    assert found(0, frame_extraction="full") == []
    assert found(12, target_frames=[9, 5, 8, 9]) == [(0, 5), (0, 9)]
    one = found(6, target_frames=[5], frame_extraction="uniform", frame_sample=9)
    assert one == [(0, 5), (1, 5)]


def test_head_reads_a_slow_video_by_time() -> None:
    # At 8 frames a second, indices in time go 0, 2, 4, 6, 8: below 9 there are five of them.
    assert kept_indices(4, 8.0) == [(0, 0), (1, 2), (2, 4), (3, 6)]
    assert found(100, source_fps=8.0) == [(0, 5)]
    assert found(100, source_fps=8.0, target_frames=[9]) == []
    assert found(100, source_fps=8.0, target_frames=[9], frame_extraction="chunk")
    # At 15 one index in 16 is left out, so of those below 17 there are 16.
    assert found(100, source_fps=15.0, target_frames=[17]) == []
    assert found(100, source_fps=15.0, target_frames=[13, 17]) == [(0, 13)]
