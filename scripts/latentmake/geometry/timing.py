"""Timestamps of a video's frames, and which frames are shown at a constant rate.

Planning keeps them as a short text: of a constant rate there is one run of equal durations.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate, groupby, pairwise
from typing import NamedTuple

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
        steps = [step for step, _ in self.runs[:-1]]
        if self.runs[-1][1] > 1:
            steps.append(self.runs[-1][0])
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
