"""Frames of a span, against reading a file frame by frame, and clips cut from it."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from latentmake.config.datasets import Dataset
from latentmake.geometry.buckets import Size
from latentmake.geometry.clips import Clip, SourceFps, Span, Timing, clips, kept_indices
from latentmake.layouts.layout import layout_of

SETTINGS = Dataset(path="data", target_frames=[5], frame_extraction="chunk")

spans = st.builds(
    Span, st.integers(0, 60), st.none() | st.integers(1, 40), st.integers(1, 6), st.booleans()
)
rates = st.none() | st.sampled_from([8.0, 15.0, 16.0, 23.976, 25.0, 30.0, 59.94])


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
@given(st.integers(0, 120), rates, spans)
def test_the_frames_of_a_span_are_those_of_reading_on(
    count: int, fps: float | None, span: Span
) -> None:
    assert [index for index, _ in kept_indices(count, fps, span)] == read(count, fps, span)


@settings(deadline=None)
@given(st.integers(0, 120), rates)
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
