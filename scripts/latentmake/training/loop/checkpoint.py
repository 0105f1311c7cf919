"""Checkpoints: a killed or a longer training resumes from them to the same weights.

A checkpoint is a folder `step-000500` with the trained weights, the state of the optimizer and a
small JSON. It is written under another name and renamed, so that the name stands for a complete
one. Random states are not in it: they follow from seed and step.

No torch here: the planner looks for checkpoints too. `loop.state` loads and saves them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar, NamedTuple

from pydantic import Field

from latentmake.plan.receipts import Amount
from latentmake.training.loop.order import Order, TrainingOrder
from latentmake.training.loop.order import wanted as wanted_by
from latentmake.training.order import JsonFile, RunFiles, Wanted

_NAME = re.compile(r"step-(\d{6,})(-\d+)?")
PROGRESS = "progress.json"


class Progress(JsonFile, extra="ignore"):  # earlier releases write more
    """Progress of a training; checkpoints of earlier releases lack what has a default.

    Attributes:
        seconds: time spent on steps so far.
        course: see `TrainingOrder.course_digest`.
        length: see `TrainingOrder.length`.
        limit: upper bound of its steps, where there is one.
        files: name of each file of the checkpoint -> its SHA-256.
        interrupted: whether a signal came before the samples and held-out losses of its step.
    """

    quiet: ClassVar[bool] = True  # it is named where a training would resume from it
    wanted: Wanted
    step: int
    loss_start: float
    seconds: Amount
    course: str = ""
    length: float = 0
    limit: int | None = None
    files: dict[str, str] = Field({})
    interrupted: bool = False


class Checkpoint(NamedTuple):
    """A checkpoint folder and its progress."""

    folder: Path
    progress: Progress


def folders(checkpoints: Path) -> list[tuple[int, Path]]:
    """Return steps and folders, newest first."""
    if not checkpoints.is_dir():
        return []
    found = [(_NAME.fullmatch(folder.name), folder) for folder in checkpoints.iterdir()]
    return sorted(((int(match[1]), folder) for match, folder in found if match), reverse=True)


def find(checkpoints: Path, wanted: Wanted) -> list[Checkpoint]:
    """Return the checkpoints of this very training, newest first."""
    return _fitting(checkpoints, lambda progress: progress.wanted == wanted)


def _fitting(checkpoints: Path, fits: Callable[[Progress], bool]) -> list[Checkpoint]:
    fitting = []
    for step, folder in folders(checkpoints):
        progress = Progress.read(folder / PROGRESS)
        if progress is not None and progress.step == step and fits(progress):
            fitting.append(Checkpoint(folder, progress))
    return fitting


def resumable(order: TrainingOrder, wanted: Wanted) -> list[Checkpoint]:
    """Return the checkpoints that a training can resume from, newest first.

    These are its own, and those of shorter trainings that are otherwise the same.
    """
    course, limit = order.course_digest(), order.trainer.step_limit or math.inf

    def fits(progress: Progress) -> bool:
        # `resumed` is of a run that an older release began with another one's checkpoint.
        same = {"settings": wanted.settings, "resumed": wanted.resumed}
        if progress.wanted.model_copy(update=same) != wanted:
            return False
        if progress.wanted == wanted:
            return True
        shorter = progress.length <= order.length and (progress.limit or math.inf) <= limit
        return progress.course == course and shorter

    return _fitting(RunFiles(order).checkpoints, fits)


def as_begun(order: Order, want: Wanted) -> Order:
    """Return an order in the precision that its training has or began with, where it chooses one.

    It is the order itself, where there is no such training. In `want`, the digests of its settings
    do not count.
    """
    if order.trainer.mixed_precision != "auto":
        return order
    chosen = [order.with_settings(mixed_precision=name) for name in ("bf16", "fp16", "no")]
    found = [(each, wanted_by(each, want.data)) for each in chosen]
    trained = [each for each, known in found if RunFiles(each).came_from(known)]
    before = [each for each, known in found if RunFiles(each).holder(known)]
    begun = [each for each, known in found if resumable(each, known)]
    return [*trained, *before, *begun, order][0]
