"""Clips of a video: first frame and length of each; which frames are shown at a constant rate.

The rules are those of musubi-tuner's video datasets (`VideoDataset.retrieve_latent_cache_batches`
and `load_video`), because its trainer takes a clip's place and length from the name of its cache.
Planning keeps timestamps as a short text: of a constant rate there is one run of equal durations.
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
"""Of a frame: containers round timestamps, Matroska and WebM to milliseconds."""

_ROUNDING = Fraction(1, 400)  # seconds by which two durations may differ for that reason

SourceFps = float | Literal["auto"] | None
"""Frame rate of a file; `auto`: its own timestamps; None keeps each frame."""

WAN_FPS = 16.0
"""Frames a second that Wan was trained on, the default here."""


class Timing(NamedTuple):
    """Durations of a video's frames, in the order of display."""

    base: Fraction  # seconds of one tick
    runs: tuple[tuple[int, int], ...]  # (duration in ticks, number of frames in a row that have it)

    @classmethod
    def of(cls, base: Fraction, times: Sequence[int], last: int) -> Timing:
        """Make it of ascending timestamps in ticks, and the duration of the last frame."""
        steps = [after - before for before, after in pairwise(times)]
        runs = ((step, len(list(same))) for step, same in groupby([*steps, last]))
        return cls(base, tuple(runs))

    @staticmethod
    @lru_cache(maxsize=4)  # many spans of one film
    def parse(text: str) -> Timing:
        """Read what `text` gives; a ValueError says that it is no such text."""
        base, colon, rest = text.partition(":")
        if not colon:
            raise ValueError("the timestamps of the video are not known")
        pairs = (each.partition("x") for each in rest.split(","))
        return Timing(Fraction(base), tuple((int(step), int(number)) for step, _, number in pairs))

    @property
    def text(self) -> str:
        """A text without spaces: `1/24000:1001x240`."""
        return f"{self.base}:{','.join(f'{step}x{number}' for step, number in self.runs)}"

    @property
    def seconds(self) -> Fraction:
        """Duration of all frames."""
        return self.base * sum(step * number for step, number in self.runs)

    def simplified(self) -> Timing:
        """Return the mean rate alone, where the rate is constant but for rounding."""
        starts = _starts(self)
        frames = len(starts) - 1
        # The last duration is left out: containers do not agree about it.
        steps = {after - before for before, after in pairwise(starts[:-1])} or {0}
        rounding = max(_ROUNDING, min(steps) * self.base / 100)
        if (max(steps) - min(steps)) * self.base > rounding or frames < 2:
            return self
        mean = self.base * starts[-2] / (frames - 1)
        return Timing(mean, ((1, frames),)) if mean else self

    def index_at(self, seconds: float) -> int:
        """Return the first frame that begins at a time or later, by a millisecond's grace."""
        moment = (Fraction(seconds) - Fraction(1, 1000)) / self.base
        return bisect_left(_starts(self)[:-1], moment)

    def at_rate(self, rate: int, first: int = 0, most: int | None = None) -> list[int]:
        """Return the frames that are shown at each 1 / rate of a second, from a first frame on.

        At most `most` of them, if that is given. A frame is shown from its timestamp to that of the
        next: of frames that come faster some are left out, and those that stay longer are repeated.
        """
        starts = _starts(self)
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


@lru_cache(maxsize=4)  # many spans of one film
def _starts(timing: Timing) -> list[int]:
    """Return the timestamp of each frame and the end of the last, in ticks from the first."""
    steps = (step for step, number in timing.runs for _ in range(number))
    return list(accumulate(steps, initial=0))


class Media(NamedTuple):
    """Size in pixels as stored (no EXIF rotation, no rotation of a video's display), and length."""

    width: int
    height: int
    frames: int  # of a video; 0 stands for an image
    timing: str = ""  # durations of a video's frames (`Timing`); "" where they do not count
    rotation: int = 0  # degrees clockwise by which a video's frames are to be turned


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
    """The frames of a file that an item uses; the default is all of them."""

    first: int = 0  # index in the file of the first one
    frames: int | None = None  # number after all thinning; None: to the end of the file
    stride: int = 1  # every n-th frame is kept, of those that the conversion of the frame rate left
    single: bool = False  # whether they are one clip, whatever the settings of clips say


_ALL = Span()


def kept_indices(
    count: int, source_fps: SourceFps, span: Span = _ALL, timing: str = "", rate: float = WAN_FPS
) -> list[tuple[int, int]]:
    """Return which of `count` frames are kept: (index in the file, index in time) of each.

    Conversion of the frame rate comes first, counted from the first frame of the span, then its
    stride. Of frames with the same index in time only the first is kept. Of a file below that rate
    all frames are kept, and their indices in time have gaps; with `auto` frames are repeated there,
    so that indices in the file may be equal.

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
    # Added up in float64 frame by frame, as musubi-tuner does, rounding errors and all.
    step = 1 if source_fps is None else rate / source_fps
    times = map(int, accumulate(repeat(step), initial=0))
    frames = zip(range(span.first, count), times, strict=False)
    kept = (next(same) for _, same in groupby(frames, key=lambda frame: frame[1]))
    most = count if most is None else min(most, count)
    return list(islice(kept, 0, most, min(span.stride, count + 1)))


def clips(
    count: int, settings: Dataset, span: Span = _ALL, timing: str = "", rate: float = WAN_FPS
) -> list[Clip]:
    """Return the clips of a video, shorter lengths first, each by its place, none twice.

    Lengths are rounded down to 4 n + 1; `uniform` of one clip is `head`, and `full` makes one clip
    whatever the lengths.

    Arguments and errors are those of `kept_indices`; a single span is one clip of its length.
    """
    way = settings.frame_extraction
    kept = kept_indices(count, settings.source_fps, span, timing, rate)
    if span.single:
        return [Clip(0, len(kept))] if len(kept) == span.frames else []
    if way == "full":
        length = (min(len(kept), settings.max_frames) - 1) // 4 * 4 + 1
        return [Clip(0, length)] if length > 0 else []
    lengths = sorted({(length - 1) // 4 * 4 + 1 for length in settings.target_frames or ()})
    if way == "uniform" and settings.frame_sample == 1:
        way = "head"
    if way == "head" and lengths:
        # It stops reading by time: a file below that rate ends before its clip is full.
        kept = [(index, time) for index, time in kept if time < lengths[-1] * span.stride]
    found: list[Clip] = []
    for length in lengths:
        last = len(kept) - length
        starts: Sequence[int] = [0]
        if way == "chunk":
            starts = range(0, last + 1, length)
        elif way == "slide":
            starts = range(0, last + 1, settings.frame_stride)
        elif way == "uniform":  # numpy.linspace(0, last, settings.frame_sample, dtype=int)
            step = last / (settings.frame_sample - 1)
            starts = [*(int(index * step) for index in range(settings.frame_sample - 1)), last]
        found += [Clip(start, length) for start in starts if last >= 0]
    return list(dict.fromkeys(found))


def sections(clip: Clip, window: int) -> list[Section]:
    """Return the sections of a clip: windows of latents behind that of its first frame.

    Source: `encode_and_save_batch` of musubi-tuner's fpack_cache_latents.py.
    """
    return [Section(*clip, number) for number in range((clip.frames - 1) // 4 // window)]
