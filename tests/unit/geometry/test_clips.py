"""Which clips a video gives, against a second reading of musubi-tuner's rules, with numpy."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from latentmake.config.datasets import Dataset
from latentmake.geometry.buckets import Size
from latentmake.geometry.clips import Clip, SourceFps, Span, Timing, clips, kept_indices
from latentmake.layouts.layout import layout_of

ROOT = Path(__file__).resolve().parents[3]
rates = st.one_of(
    st.none(),
    st.sampled_from([8.0, 12.0, 15.0, 16.0, 23.976, 24.0, 25.0, 29.97, 30.0, 50.0, 59.94, 60.0]),
    st.floats(0.5, 1000),
)


def found(count: int, **changes: Any) -> list[tuple[int, int]]:
    cut = clips(count, Dataset.model_construct(**{"target_frames": [5, 9], **changes}))
    return [(clip.start, clip.frames) for clip in cut]


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


@settings(deadline=None)
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


SETTINGS = Dataset(path="data", target_frames=[5], frame_extraction="chunk")

spans = st.builds(
    Span, st.integers(0, 60), st.none() | st.integers(1, 40), st.integers(1, 6), st.booleans()
)
usual = st.none() | st.sampled_from([8.0, 15.0, 16.0, 23.976, 25.0, 30.0, 59.94])


def read(count: int, fps: float | None, span: Span) -> list[int]:
    """Numbers of the frames of a span, read one after the other."""
    taken: list[int] = []
    clock, shown, passed = 0.0, -1, -1
    for number in range(count):
        if number < span.first:
            continue
        now = number if fps is None else int(clock)
        clock += 16 / fps if fps else 0
        if now == shown:
            continue
        shown, passed = now, passed + 1
        if passed % span.stride == 0 and len(taken) != span.frames:
            taken.append(number)
    return taken


@settings(deadline=None)
@given(st.integers(0, 120), usual, spans)
def test_the_frames_of_a_span_are_those_of_reading_on(
    count: int, fps: float | None, span: Span
) -> None:
    assert [index for index, _ in kept_indices(count, fps, span)] == read(count, fps, span)


@settings(deadline=None)
@given(st.integers(0, 120), usual)
def test_the_span_of_everything_changes_nothing(count: int, fps: float | None) -> None:
    assert kept_indices(count, fps, Span()) == kept_indices(count, fps)
    each = SETTINGS.model_copy(update={"source_fps": fps})
    assert clips(count, each, Span()) == clips(count, each)


def timings(count: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(1, 400), min_size=count, max_size=count)


@settings(deadline=None)
@given(st.integers(1, 40).flatmap(timings), spans)
def test_auto_shows_the_frame_that_is_due_at_each_sixteenth_of_a_second(
    steps: list[int], span: Span
) -> None:
    base = Fraction(1, 1000)
    times = [sum(steps[:number]) for number in range(len(steps))]
    timing = Timing.of(base, times, steps[-1])
    assert Timing.parse(timing.text) == timing
    kept = [i for i, _ in kept_indices(len(steps), "auto", span, timing.text)]
    shown: list[int] = []
    if span.first < len(steps):
        begin, end = times[span.first], times[-1] + steps[-1]
        number = 0
        while number == 0 or begin + Fraction(50 * number + 1, 800) / base < end:
            due = begin + Fraction(50 * number + 1, 800) / base
            late = [i for i, time in enumerate(times) if time <= due and i >= span.first]
            shown.append(late[-1] if number else span.first)
            number += 1
    assert kept == shown[:: span.stride][: span.frames]


@pytest.mark.parametrize(
    ("base", "step", "count", "shown"),
    [
        ("1/24", 1, 6, [0, 1, 3, 4]),
        ("1/15360", 640, 24, [0, 1, 3, 4, 6, 7, 9, 10, 12, 13, 15, 16, 18, 19, 21, 22]),
        ("1/16", 1, 5, [0, 1, 2, 3, 4]),
        ("1/8", 1, 3, [0, 0, 1, 1, 2, 2]),
        ("1/48", 1, 7, [0, 3, 6]),
    ],
)
def test_auto_of_a_constant_rate(base: str, step: int, count: int, shown: list[int]) -> None:
    timing = f"{base}:{step}x{count}"
    assert [index for index, _ in kept_indices(count, "auto", timing=timing)] == shown


def test_timestamps_rounded_to_milliseconds_keep_each_frame_of_sixteen_a_second() -> None:
    for rounded in (int, round):
        times = [int(rounded(number * 62.5)) for number in range(40)]
        timing = Timing.of(Fraction(1, 1000), times, 62)
        assert [i for i, _ in kept_indices(40, "auto", timing=timing.text)] == list(range(40))
        assert len(timing.simplified().runs) == 1


def test_a_variable_rate_is_told_from_rounding() -> None:
    variable = Timing.of(Fraction(1, 1000), [0, 33, 66, 133, 166], 33)
    assert variable.simplified() == variable
    assert len(Timing.of(Fraction(1, 1000), [0, 33, 67, 100], 500).simplified().runs) == 1


def test_auto_needs_timestamps() -> None:
    with pytest.raises(ValueError, match="not known"):
        kept_indices(5, "auto")


def test_a_single_span_is_one_clip_or_none() -> None:
    assert clips(20, SETTINGS, Span(7, 13, 1, single=True)) == [Clip(0, 13)]
    assert clips(19, SETTINGS, Span(7, 13, 1, single=True)) == []
    assert clips(20, SETTINGS, Span(7, 13)) == [Clip(0, 5), Clip(5, 5)]


def variant(clip: Clip, span: Span | None, fps: SourceFps = None) -> str:
    values = Dataset(path="data", target_frames=[5], source_fps=fps)
    musubi = layout_of("musubi")
    return musubi.view(Size(64, 64), Size(64, 64), values, clip=clip, span=span)[0]


def test_a_key_says_which_frames_of_the_file_a_clip_has() -> None:
    plain = variant(Clip(0, 5), None)
    assert plain == variant(Clip(0, 5), Span()) == variant(Clip(0, 5), Span(0, 5, 1)) == "64x64:0-5"
    assert variant(Clip(3, 5), Span(4)) == variant(Clip(7, 5), None)
    assert variant(Clip(0, 5), Span(stride=2)) == "64x64:0-5x2"
    assert variant(Clip(3, 5), Span(1, stride=2)) == variant(Clip(0, 5), Span(7, stride=2))
    # A converted rate is counted from the span's first frame.
    assert variant(Clip(3, 5), Span(4), 30.0) != variant(Clip(7, 5), None, 30.0)
    assert variant(Clip(0, 5), Span(), 30.0) == variant(Clip(0, 5), None, 30.0)
    found = {variant(Clip(1, 5), Span(x, stride=y), 30.0) for x in (0, 1, 2) for y in (1, 2, 3)}
    assert len(found) == 9
