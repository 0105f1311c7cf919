"""Estimate of a training before it begins: memory of a device, disk, time."""

from __future__ import annotations

from typing import NamedTuple

from latentmake.files.disk import Need, human

__all__ = ["TrainingEstimate", "duration"]


class TrainingEstimate(NamedTuple):
    """What a training takes.

    Attributes:
        run: its name.
        memory: parts of what one device must hold -> bytes, the largest first in importance.
        disk: bytes of its results and of the checkpoints that are kept.
        folder: their place.
        steps: of the optimizer; None where the number of items decides.
        seconds: a step, as measured before; None where nothing was.
    """

    run: str
    memory: dict[str, int]
    disk: int
    folder: str
    steps: int | None = None
    seconds: float | None = None

    @property
    def need(self) -> Need:
        """Room for results and checkpoints."""
        return Need(f"results and checkpoints of {self.run}", self.folder, self.disk)

    @property
    def note(self) -> str:
        """The estimate in words: memory, disk, time."""
        parts = ", ".join(f"{name} {human(size)}" for name, size in self.memory.items())
        time = "time unknown until a first training has run"
        if self.seconds is not None:
            each = f"{self.seconds:.2g} s a step, as in the last training"
            time = (
                each
                if self.steps is None
                else f"{duration(self.steps * self.seconds / 60)} at {each}"
            )
        return (
            f"about {human(sum(self.memory.values()))} of GPU memory ({parts}), "
            f"{human(self.disk)} of disk; {time}"
        )


def duration(minutes: float) -> str:
    """Return a time for people: `40 s`, `25 min`, `3.5 h`."""
    if minutes < 1:
        return f"{max(1, round(minutes * 60))} s"
    return f"{round(minutes)} min" if minutes < 120 else f"{minutes / 60:.1f} h"
