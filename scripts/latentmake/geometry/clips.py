"""Clips of a video, and the frames to show at a constant frame rate.

The rules are those of musubi-tuner's video datasets (`VideoDataset.retrieve_latent_cache_batches`
and `load_video`), because its trainer reads the first frame and the length of a clip from the name
of its cache. Timestamps are kept as a short text of runs of equal durations; a video of a constant
rate has one run.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate, groupby, islice, pairwise, repeat
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from latentmake.config.datasets import Dataset

_TOLERANCE = Fraction(1, 50)
"""Part of a frame by which a timestamp may be wrong: Matroska and WebM round to milliseconds."""

_ROUNDING = Fraction(1, 400)  # seconds by which rounding may make two durations differ

SourceFps = float | Literal["auto"] | None
"""Frame rate of a file. `auto` uses its timestamps; None keeps every frame."""

WAN_FPS = 16.0
"""Frame rate that Wan was trained on, and the default."""


class Timing(NamedTuple):
    """Durations of a video's frames, in display order.

    Attributes:
        base: seconds of one tick.
        runs: pairs of a duration in ticks and the number of successive frames that have it.
    """

    base: Fraction
    runs: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, base: Fraction, times: Sequence[int], last: int) -> Timing:
        """Make a timing from ascending timestamps and the duration of the last frame, in ticks."""
        steps = [after - before for before, after in pairwise(times)]
        runs = ((step, len(list(same))) for step, same in groupby([*steps, last]))
        return cls(base, tuple(runs))

    @staticmethod
    @lru_cache(maxsize=4)  # a list may have many spans of one film
    def parse(text: str) -> Timing:
        """Parse the form of `Timing.text`; raises ValueError if it is another text."""
        base, colon, rest = text.partition(":")
        if not colon:
            raise ValueError("the timestamps of the video are not known")
        pairs = (run.partition("x") for run in rest.split(","))
        return Timing(Fraction(base), tuple((int(step), int(number)) for step, _, number in pairs))

    @property
    def text(self) -> str:
        """The timing as a text without spaces, such as `1/24000:1001x240`."""
        return f"{self.base}:{','.join(f'{step}x{number}' for step, number in self.runs)}"

    @property
    def seconds(self) -> Fraction:
        """Duration of all frames."""
        return self.base * sum(step * number for step, number in self.runs)

    def simplified(self) -> Timing:
        """Return the timing with one mean duration, if durations differ only by rounding."""
        starts = _starts(self)
        frames = len(starts) - 1
        # The last duration does not count, because containers do not agree about it.
        steps = {after - before for before, after in pairwise(starts[:-1])} or {0}
        rounding = max(_ROUNDING, min(steps) * self.base / 100)
        if (max(steps) - min(steps)) * self.base > rounding or frames < 2:
            return self
        mean = self.base * starts[-2] / (frames - 1)
        return Timing(mean, ((1, frames),)) if mean else self

    def index_at(self, seconds: float) -> int:
        """Return the first frame that begins at a time or later, with a tolerance of 1 ms."""
        moment = (Fraction(seconds) - Fraction(1, 1000)) / self.base
        return bisect_left(_starts(self)[:-1], moment)

    def at_rate(self, rate: int, first: int = 0, most: int | None = None) -> list[int]:
        """Return the frame that is shown at each tick of a constant frame rate.

        A frame is shown from its timestamp to that of the next one. So some frames are dropped
        where they follow faster than the rate, and frames that stay longer are repeated.

        Args:
            rate: frames a second of the result.
            first: first frame of the result.
            most: largest number of frames; None for no limit.
        """
        starts = _starts(self)
        if first >= len(starts) - 1 or most == 0:
            return []
        begin, last = starts[first], len(starts) - 1
        # Frame k of the result is due at (k + tolerance) / rate seconds; integers keep this exact.
        ticks = 1 / (self.base * rate * _TOLERANCE.denominator)
        shown = [first]
        while len(shown) != most:
            due = len(shown) * _TOLERANCE.denominator + _TOLERANCE.numerator
            moment = begin + due * ticks.numerator // ticks.denominator
            if moment >= starts[last]:
                break
            shown.append(bisect_right(starts, moment, lo=shown[-1], hi=last) - 1)
        return shown


@lru_cache(maxsize=4)  # a list may have many spans of one film
def _starts(timing: Timing) -> list[int]:
    """Return the timestamps of all frames and the end of the last one, in ticks from the first."""
    steps = (step for step, number in timing.runs for _ in range(number))
    return list(accumulate(steps, initial=0))


class Media(NamedTuple):
    """Size and length of an image or video.

    Attributes:
        width: width in pixels as stored, before any EXIF or display rotation.
        height: height in pixels, likewise.
        frames: number of frames of a video; 0 for an image.
        timing: durations of the frames (see `Timing.text`); "" if they do not count.
        rotation: display rotation of a video in degrees clockwise.
    """

    width: int
    height: int
    frames: int
    timing: str = ""
    rotation: int = 0


class Clip(NamedTuple):
    """Clip of a video, or one of its sections.

    Attributes:
        start: position of the first frame among the frames that `kept_indices` keeps.
        frames: number of frames, 4 n + 1.
        section: index of the section, the frames that a network such as FramePack makes at once;
            None for the complete clip.
    """

    start: int
    frames: int
    section: int | None = None

    def numbers(self) -> list[int]:
        """Return its numbers, as orders contain them; only a section has three."""
        return [number for number in self if number is not None]


class Span(NamedTuple):
    """Frames of a video file that an item uses; by default all of them.

    Attributes:
        first: index of the first frame in the file.
        frames: number of frames after frame rate conversion and stride; None: to the end.
        stride: step between the frames to use, after frame rate conversion.
        single: whether the span is one clip, regardless of the dataset's `frame_extraction`.
    """

    first: int = 0
    frames: int | None = None
    stride: int = 1
    single: bool = False


_ALL = Span()


def kept_indices(
    count: int, source_fps: SourceFps, span: Span = _ALL, timing: str = "", rate: float = WAN_FPS
) -> list[tuple[int, int]]:
    """Return the frames of a file that are kept, as pairs (index in the file, index in time).

    The frame rate is converted first, counted from the first frame of the span. Then the stride is
    applied. If several frames have the same index in time, only the first is kept. If the file has
    a lower frame rate than `rate`, all frames are kept, and their indices in time have gaps. With
    `auto`, frames are repeated instead, so several pairs may have the same index in the file.

    Args:
        count: number of frames in the file.
        source_fps: frame rate of the file.
        span: part of the file.
        timing: durations of the frames (see `Timing.text`), necessary with `auto`.
        rate: frame rate to convert to, a whole number.

    Raises:
        ValueError: `source_fps` is `auto`, and `timing` is not known.
    """
    # Stop after the frames of the span: the file may be a long film.
    most = None if span.frames is None else span.frames * span.stride
    if source_fps == "auto":
        chosen = Timing.parse(timing).at_rate(int(rate), span.first, most)
        return [(index, time) for time, index in enumerate(chosen) if index < count][:: span.stride]
    # Add up in float64 frame by frame, to get the same rounding errors as musubi-tuner.
    step = 1 if source_fps is None else rate / source_fps
    times = map(int, accumulate(repeat(step), initial=0))
    frames = zip(range(span.first, count), times, strict=False)
    kept = (next(same) for _, same in groupby(frames, key=lambda frame: frame[1]))
    most = count if most is None else min(most, count)
    return list(islice(kept, 0, most, min(span.stride, count + 1)))


def clips(
    count: int, settings: Dataset, span: Span = _ALL, timing: str = "", rate: float = WAN_FPS
) -> list[Clip]:
    """Return the clips of a video, without duplicates, sorted by length and then by start.

    Lengths are rounded down to 4 n + 1. `frame_extraction: uniform` with one clip is the same as
    `head`, and `full` makes one clip and ignores `target_frames`. A single span is one clip.

    For arguments and errors, see `kept_indices`.
    """
    extraction = settings.frame_extraction
    kept = kept_indices(count, settings.source_fps, span, timing, rate)
    if span.single:
        return [Clip(0, len(kept))] if len(kept) == span.frames else []
    if extraction == "full":
        length = (min(len(kept), settings.max_frames) - 1) // 4 * 4 + 1
        return [Clip(0, length)] if length > 0 else []
    lengths = sorted({(length - 1) // 4 * 4 + 1 for length in settings.target_frames or ()})
    if extraction == "uniform" and settings.frame_sample == 1:
        extraction = "head"
    if extraction == "head" and lengths:
        # musubi-tuner stops reading by time, so a file of a lower rate gives too few frames.
        kept = [(index, time) for index, time in kept if time < lengths[-1] * span.stride]
    results: list[Clip] = []
    for length in lengths:
        last = len(kept) - length
        starts: Sequence[int] = [0]
        if extraction == "chunk":
            starts = range(0, last + 1, length)
        elif extraction == "slide":
            starts = range(0, last + 1, settings.frame_stride)
        elif extraction == "uniform":  # numpy.linspace(0, last, settings.frame_sample, dtype=int)
            step = last / (settings.frame_sample - 1)
            starts = [*(int(index * step) for index in range(settings.frame_sample - 1)), last]
        results += [Clip(start, length) for start in starts if last >= 0]
    return list(dict.fromkeys(results))


def sections(clip: Clip, window: int) -> list[Clip]:
    """Return the sections of a clip: windows of latents after the latent of its first frame.

    Source: `encode_and_save_batch` of musubi-tuner's fpack_cache_latents.py.
    """
    count = (clip.frames - 1) // 4 // window
    return [clip._replace(section=number) for number in range(count)]
