"""Clips of a video: first frame and length of each; which frames are shown at a constant rate.

The rules are those of musubi-tuner's video datasets (`VideoDataset.retrieve_latent_cache_batches`
and `load_video`), because its trainer takes a clip's place and length from the name of its cache.
Planning keeps timestamps as a short text: of a constant rate there is one run of equal durations.
"""

from __future__ import annotations

import sys
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate, groupby, islice, pairwise
from itertools import count as counting
from typing import Literal, NamedTuple

_TOLERANCE = Fraction(1, 50)
"""Of a frame: containers round timestamps, Matroska and WebM to milliseconds."""

_ROUNDING = Fraction(1, 400)  # seconds by which two durations may differ for that reason


class Timing(NamedTuple):
    """Durations of a video's frames, in the order of display.

    Attributes:
        base: seconds of one tick.
        runs: (duration in ticks, number of frames in a row that have it).
    """

    base: Fraction
    runs: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, base: Fraction, times: Sequence[int], last: int) -> Timing:
        """Make it of ascending timestamps in ticks, and the duration of the last frame."""
        steps = [after - before for before, after in pairwise(times)]
        runs = ((step, len(list(same))) for step, same in groupby([*steps, last]))
        return cls(base, tuple(runs))

    @classmethod
    def parse(cls, text: str) -> Timing:
        """Read what `text` gives.

        Raises:
            ValueError: it is no such text.
        """
        return _parsed(text)

    @property
    def text(self) -> str:
        """A text without spaces: `1/24000:1001x240`."""
        return f"{self.base}:{','.join(f'{step}x{number}' for step, number in self.runs)}"

    @property
    def frames(self) -> int:
        """Number of frames."""
        return sum(number for _, number in self.runs)

    @property
    def seconds(self) -> Fraction:
        """Duration of all frames."""
        return self.base * sum(step * number for step, number in self.runs)

    @property
    def rate(self) -> float:
        """Mean number of frames a second; 0 where all durations are 0."""
        return float(self.frames / self.seconds) if self.seconds else 0.0

    @property
    def is_variable(self) -> bool:
        """Whether durations differ by more than the rounding of timestamps.

        The last one is left out: containers do not agree about it.
        """
        *others, (last, number) = self.runs
        steps = [*(step for step, _ in others), *[last] * (number > 1)]
        if not steps:
            return False
        return (max(steps) - min(steps)) * self.base > max(_ROUNDING, min(steps) * self.base / 100)

    def simplified(self) -> Timing:
        """Return the mean rate alone, where the rate is constant but for rounding."""
        if self.is_variable or self.frames < 2:
            return self
        starts = self.starts()
        mean = self.base * (starts[-2] - starts[0]) / (self.frames - 1)
        return Timing(mean, ((1, self.frames),)) if mean else self

    def index_at(self, seconds: float) -> int:
        """Return the first frame that begins at a time or later, by a millisecond's grace."""
        moment = (Fraction(seconds) - Fraction(1, 1000)) / self.base
        return bisect_left(self.starts()[:-1], moment)

    def starts(self) -> list[int]:
        """Return the timestamp of each frame and the end of the last, in ticks from the first."""
        return _starts(self)

    def at_rate(self, rate: int, first: int = 0, most: int | None = None) -> list[int]:
        """Return the frames that are shown at each 1 / rate of a second, from a first frame on.

        At most `most` of them, if that is given.

        A frame is shown from its timestamp to that of the next: of frames that come faster some are
        left out, and those that stay longer are repeated.
        """
        starts = self.starts()
        if first >= len(starts) - 1 or most == 0:
            return []
        begin, last = starts[first], len(starts) - 1
        # In whole numbers: the new rate's frame k is due at (k + tolerance) * ticks.
        ticks = 1 / (self.base * rate * _TOLERANCE.denominator)
        shown = [first]
        while len(shown) != most:
            due = len(shown) * _TOLERANCE.denominator + _TOLERANCE.numerator
            moment = begin + due * ticks.numerator // ticks.denominator
            if moment >= starts[last]:
                break
            shown.append(bisect_right(starts, moment, lo=shown[-1], hi=last) - 1)
        return shown


@lru_cache(maxsize=4)
def _parsed(text: str) -> Timing:
    base, colon, rest = text.partition(":")
    if not colon:
        raise ValueError("the timestamps of the video are not known")
    pairs = (each.partition("x") for each in rest.split(","))
    return Timing(Fraction(base), tuple((int(step), int(number)) for step, _, number in pairs))


@lru_cache(maxsize=4)  # many spans of one film
def _starts(timing: Timing) -> list[int]:
    steps = (step for step, number in timing.runs for _ in range(number))
    return list(accumulate(steps, initial=0))


SourceFps = float | Literal["auto"] | None
"""Frame rate of a file; `auto`: its own timestamps; None keeps each frame."""

WAN_FPS = 16.0
"""Frames a second that Wan was trained on, the default here."""


class Media(NamedTuple):
    """Size in pixels as stored (no EXIF rotation, no rotation of a video's display), and length.

    Attributes:
        frames: of a video; 0 stands for an image.
        timing: durations of a video's frames (`Timing`); "" where they do not count.
        rotation: degrees clockwise by which a video's frames are to be turned.
    """

    width: int
    height: int
    frames: int
    timing: str = ""
    rotation: int = 0


class Clip(NamedTuple):
    """A part of a video: position of its first frame among those kept, and length (4 n + 1)."""

    start: int
    frames: int


class Section(NamedTuple):
    """A stretch of a clip that a network makes at once; `number` counts from the clip's beginning.

    The first two fields are the clip's.
    """

    start: int
    frames: int
    number: int


AnyClip = Clip | Section


class Span(NamedTuple):
    """The frames of a file that an item uses; the default is all of them.

    Attributes:
        first: index in the file of the first one.
        frames: number after all thinning; None: to the end of the file.
        stride: every n-th frame is kept, of those that the conversion of the frame rate left.
        single: whether they are one clip, whatever the settings of clips say.
    """

    first: int = 0
    frames: int | None = None
    stride: int = 1
    single: bool = False


_ALL = Span()


def time_indices(source_fps: float | None, rate: float = WAN_FPS) -> Iterator[int]:
    """Yield, for each frame of a file in turn, its index in time at `rate` a second; no end.

    The step rate / source_fps is added up in float64 frame by frame, as musubi-tuner does, rounding
    errors and all. Of frames with the same index only the first is kept; without a rate, all are.
    """
    if source_fps is None:
        yield from counting()
    else:
        step = rate / source_fps
        time = 0.0
        while True:
            yield int(time)
            time += step


def kept_indices(
    count: int,
    source_fps: SourceFps,
    span: Span = _ALL,
    timing: str = "",
    rate: float = WAN_FPS,
) -> list[tuple[int, int]]:
    """Return which of `count` frames are kept: (index in the file, index in time) of each.

    Conversion of the frame rate comes first, counted from the first frame of the span, then its
    stride. Of a file below that rate all frames are kept, and their indices in time have gaps; with
    `auto` frames are repeated there, so that indices in the file may be equal.

    Args:
        count: frames in the file.
        source_fps: its frame rate.
        span: the part of the file.
        timing: durations of its frames, see `Timing`; needed with `auto`.
        rate: frames a second that it is converted to, a whole number.

    Raises:
        ValueError: `auto` without the durations of all frames.
    """
    # A span of a few frames costs these alone, however long the file is.
    most = None if span.frames is None else span.frames * span.stride
    if source_fps == "auto":
        chosen = Timing.parse(timing).at_rate(int(rate), span.first, most)
        return [(index, time) for time, index in enumerate(chosen) if index < count][:: span.stride]
    times = zip(range(span.first, count), time_indices(source_fps, rate), strict=False)
    kept = (next(frames) for _, frames in groupby(times, key=lambda frame: frame[1]))
    stop = None if most is None else min(most, sys.maxsize)
    return list(islice(kept, 0, stop, min(span.stride, sys.maxsize)))


def clips(
    count: int,
    *,
    target_frames: Sequence[int],
    frame_extraction: str,
    frame_stride: int,
    frame_sample: int,
    max_frames: int,
    source_fps: SourceFps,
    span: Span = _ALL,
    timing: str = "",
    rate: float = WAN_FPS,
) -> list[Clip]:
    """Return the clips of a video, shorter lengths first, each by its place, none twice.

    Args:
        count: frames in the file.
        target_frames: lengths of clips, in frames; rounded down to 4 n + 1.
        frame_extraction: `head`: the beginning. `chunk`: one after the other. `slide`: one every
            `frame_stride` frames. `uniform`: `frame_sample` of them, evenly spread; 1 of them is
            `head`. `full`: one of all frames up to `max_frames`, rounded down to 4 n + 1, whatever
            `target_frames` says.
        frame_stride: frames from the beginning of a clip to that of the next.
        frame_sample: clips of each length.
        max_frames: most frames of the one clip of `full`.
        source_fps: frame rate of the file; None keeps each frame.
        span: the part of the file that clips are cut from; a single one is one clip of its length.
        timing: durations of its frames, needed with `auto`.
        rate: frames a second that it is converted to.

    Raises:
        ValueError: `frame_extraction` is none of these, or `auto` without durations.
    """
    lengths = sorted({_rounded(length) for length in target_frames})
    kept = kept_indices(count, source_fps, span, timing, rate)
    if span.single:
        return [Clip(0, len(kept))] if len(kept) == span.frames else []
    if frame_extraction == "uniform" and frame_sample == 1:
        frame_extraction = "head"
    if frame_extraction == "head":
        # It stops reading by time: a file below that rate ends before its clip is full.
        longest = max(lengths, default=0)
        kept = [(index, time) for index, time in kept if time < longest * span.stride]
    if frame_extraction == "full":
        length = _rounded(min(len(kept), max_frames))
        return [Clip(0, length)] if length > 0 else []
    found: list[Clip] = []
    for length in lengths:
        last = len(kept) - length
        if last < 0:
            continue
        match frame_extraction:
            case "head":
                starts = [0]
            case "chunk":
                starts = list(range(0, last + 1, length))
            case "slide":
                starts = list(range(0, last + 1, frame_stride))
            case "uniform":
                starts = _spread(last, frame_sample)
            case _:
                raise ValueError(f"there is no frame_extraction {frame_extraction!r}")
        found.extend(Clip(start, length) for start in starts)
    return list(dict.fromkeys(found))


def sections(frames: int, window: int) -> int:
    """Return the number of sections of a clip: windows of latents behind that of its first frame.

    Source: `encode_and_save_batch` of musubi-tuner's fpack_cache_latents.py.

    Args:
        frames: length of the clip.
        window: latents of a section.
    """
    return (frames - 1) // 4 // window


def _rounded(frames: int) -> int:
    return (frames - 1) // 4 * 4 + 1


def _spread(last: int, number: int) -> list[int]:
    """Return what numpy.linspace(0, last, number, dtype=int) gives, for two or more."""
    step = last / (number - 1)
    return [int(index * step) for index in range(number - 1)] + [last]
