"""Clips cut from a video one after the other, so that few of their frames are in memory at once.

Frames that a clip shares with the one before are decoded and scaled once. Where that cannot be, for
a clip needs a frame of before that is gone, the file is read anew from there.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from latentmake.caches.inputs import FramesAt
from latentmake.files.frames import EndedError

Key = TypeVar("Key", bound=Hashable)
Array = NDArray[np.uint8]


class Cut(NamedTuple, Generic[Key]):
    """One clip.

    Attributes:
        kept: indices in the file of all frames that its item uses, none smaller than the one
            before.
        start: its first frame, counted among these.
        frames: its length.
        keys: what its frames are scaled for.
    """

    kept: Sequence[int]
    start: int
    frames: int
    keys: tuple[Key, ...]

    @property
    def first(self) -> int:
        """Index in the file of its first frame."""
        return self.kept[self.start]

    @property
    def last(self) -> int:
        """Index in the file of its last frame."""
        return self.kept[self.start + self.frames - 1]

    @property
    def reach(self) -> tuple[int, int]:
        """Indices in the file of its first and last frames, by which cuts are put in order."""
        return self.first, self.last

    @property
    def indices(self) -> Sequence[int]:
        """Indices in the file of its frames."""
        return self.kept[self.start : self.start + self.frames]


class _Step(NamedTuple, Generic[Key]):
    """A cut, whether it takes frames from the clip at hand, and what a new reading reads."""

    cut: Cut[Key]
    shares: bool
    reading: list[int] | None


class _Held(NamedTuple, Generic[Key]):
    """A clip at hand: the rows of its frames by their indices, and its pixels."""

    last: int
    rows: dict[int, int]
    stacks: dict[Key, Array]


class Cutter(Generic[Key]):
    """Clips of one file.

    Args:
        path: of the file.
        cuts: clips to be made, in the order of their first and last frames.
        scaled: gives the pixels of a frame for a key, all of one shape.
        frames_at: reads frames.
        repeats_last: whether the last frame that is used is repeated where the file ends early.
    """

    def __init__(
        self,
        path: str,
        cuts: Sequence[Cut[Key]],
        scaled: Callable[[Array, Key], Array],
        frames_at: FramesAt,
        *,
        repeats_last: bool = False,
    ) -> None:
        self._path = path
        self._scaled = scaled
        self._frames_at = frames_at
        self._repeats_last = repeats_last
        self._steps = deque(_steps(cuts))
        self._frames: Iterator[tuple[int, Array]] = iter(())
        self._frame: tuple[int, Array] | None = None
        self._end: int | None = None
        self._held: _Held[Key] | None = None
        self._latest = True

    @property
    def holds_another(self) -> bool:
        """Whether a clip besides the one made last is in memory, for frames that others share."""
        return self._held is not None and not self._latest

    def cut(self) -> dict[Key, Array]:
        """Make the next clip: [frames, height, width, 3] for each key.

        Raises:
            SourceError: the file is damaged, or ends before.
        """
        cut, shares, reading = self._steps.popleft()
        if reading is not None:
            self._frames, self._frame = self._frames_at(self._path, reading), None
        held = self._held if shares else None
        if held is None:
            self._held = None
        stacks: dict[Key, Array] = {}
        rows: dict[int, int] = {}
        for row, index in enumerate(cut.indices):
            if index in rows:
                for stack in stacks.values():
                    stack[row] = stack[rows[index]]
                continue
            is_there = self._end is None or index < self._end
            if held is not None and index in held.rows and is_there:
                pixels = {key: held.stacks[key][held.rows[index]] for key in cut.keys}
            else:
                frame = self._frame_at(cut.kept, index)
                pixels = {key: self._scaled(frame, key) for key in cut.keys}
            rows[index] = row
            for key, values in pixels.items():
                if key not in stacks:
                    stacks[key] = np.empty((cut.frames, *values.shape), np.uint8)
                stacks[key][row] = values
        self._hold(_Held(cut.last, rows, stacks))
        if not self._steps:
            self._frames, self._frame = iter(()), None
        return dict(stacks)

    def _hold(self, made: _Held[Key]) -> None:
        """Keep the clip that reaches furthest, if the next one takes frames from it."""
        shares = bool(self._steps) and self._steps[0].shares
        self._latest = self._held is None or made.last >= self._held.last
        if self._latest:
            self._held = made
        if not shares:
            self._held = None

    def _frame_at(self, kept: Sequence[int], index: int) -> Array:
        if self._end is None or index < self._end:
            try:
                self._frame = next(self._frames)
                return self._frame[1]
            except EndedError as error:
                if not self._repeats_last:
                    raise
                self._end = error.frames
        place = bisect_left(kept, self._end)
        if place == 0:
            raise EndedError(self._path, self._end, index)
        last = kept[place - 1]
        if self._frame is None or self._frame[0] != last:
            (self._frame,) = self._frames_at(self._path, [last])
        return self._frame[1]


def _steps(cuts: Sequence[Cut[Key]]) -> Iterator[_Step[Key]]:
    """Yield what to do for each cut."""
    steps: list[tuple[Cut[Key], bool]] = []
    reading: list[int] = []
    held: Cut[Key] | None = None
    at_hand: frozenset[int] = frozenset()
    for cut in cuts:
        shares = held is not None and cut.first <= held.last and {*cut.keys} <= {*held.keys}
        needed = [*dict.fromkeys(cut.indices)]
        new = [index for index in needed if index not in at_hand] if shares else needed
        if not steps or (new and reading and new[0] <= reading[-1]):
            yield from _run(steps, reading)
            steps, reading, shares, new = [], [], False, needed
        steps.append((cut, shares))
        reading += new
        if not shares or held is None or cut.last >= held.last:
            held, at_hand = cut, frozenset(needed)
    yield from _run(steps, reading)


def _run(steps: Sequence[tuple[Cut[Key], bool]], reading: list[int]) -> Iterator[_Step[Key]]:
    for number, (cut, shares) in enumerate(steps):
        yield _Step(cut, shares, reading if number == 0 else None)
