"""Estimate of a training before it begins: memory of a device, disk, time."""

from __future__ import annotations

from typing import NamedTuple

from latentmake.files.disk import Need, human
from latentmake.models.flops import guessed_speed


class TrainingEstimate(NamedTuple):
    """Memory, disk and time of a training.

    Attributes:
        run: its name.
        memory: parts of what one device must hold -> bytes, the largest first in importance.
        disk: bytes of its results and of the checkpoints that are kept.
        folder: their place.
        steps: of the optimizer; None where the number of items decides.
        seconds: a step, as measured before; None where nothing was.
        work: floating-point operations of a step.
    """

    run: str
    memory: dict[str, int]
    disk: int
    folder: str
    steps: int | None = None
    seconds: float | None = None
    work: float | None = None

    @property
    def need(self) -> Need:
        """Room for results and checkpoints."""
        return Need(f"results and checkpoints of {self.run}", self.folder, self.disk)

    @property
    def note(self) -> str:
        """The estimate in words: memory, disk, time."""
        parts = ", ".join(f"{name} {human(size)}" for name, size in self.memory.items())
        steps = self.steps or 1
        if self.seconds is not None:
            rate = f"{self.seconds:.2g} s a step, as in the last training"
            time = (
                rate if self.steps is None else f"{duration(steps * self.seconds / 60)} at {rate}"
            )
        else:
            time = guessed(None if self.work is None else steps * self.work)
            time += " for a step" * (self.steps is None and self.work is not None)
        return (
            f"about {human(sum(self.memory.values()))} of GPU memory ({parts}), "
            f"{human(self.disk)} of disk; {time}"
        )


def guessed(work: float | None) -> str:
    """Return a guess at the time of floating-point operations on this machine, in words."""
    if work is None:
        return "time unknown"
    speed = guessed_speed()
    rate = f"{speed / 1e12:.3g} TFLOP/s"
    return f"about {duration(work / speed / 60)} if it does {rate}"


def duration(minutes: float) -> str:
    """Return a time for people: `40 s`, `25 min`, `3.5 h`."""
    if minutes < 1:
        return f"{max(1, round(minutes * 60))} s"
    return f"{round(minutes)} min" if minutes < 120 else f"{minutes / 60:.1f} h"
