"""Errors for a file with fewer frames than were asked for, and for one whose reading hangs."""

from __future__ import annotations

from latentmake.errors import SourceError


class EndedError(SourceError):
    """A file has fewer frames than were asked for.

    Attributes:
        frames: those it has.
        needed: index of the first one that it lacks.
    """

    def __init__(self, path: str, frames: int, needed: int) -> None:
        self.frames = frames
        self.needed = needed
        what = f"ends after {frames} frames, but frame {needed} is needed"
        super().__init__(what, where=path, hint="convert it again, replace or remove it")


class HungError(SourceError):
    """A process that reads a file gives no sign of life."""
