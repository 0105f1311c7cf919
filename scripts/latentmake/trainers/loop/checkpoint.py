"""Checkpoints, from which a killed or a longer training resumes and ends with the same weights.

A checkpoint is a folder `step-000500` with the trained weights, the state of the optimizer and a
small JSON file. It is written under another name and then renamed, so a folder of this name is
always complete. It has no random states, because these follow from seed and step.

This module does not import torch, because the planner looks for checkpoints too. `loop.state` loads
and saves them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

from pydantic import Field

from latentmake.plan.estimates import Amount
from latentmake.plan.product import Made, Parts
from latentmake.runs.order import PROGRESS, RunFiles, parts_in
from latentmake.trainers.loop.order import Order, TrainingOrder

_NAME = re.compile(r"step-(\d{6,})(-\d+)?")


class Progress(Made):
    """Progress of a training. Checkpoints of earlier releases lack the fields with a default.

    Attributes:
        step: number of completed steps.
        loss_start: loss before the training.
        seconds: time spent on steps so far.
        course: digest of the settings except the length, see `TrainingOrder.course_digest`.
        length: epochs or steps of the training, see `TrainingOrder.length`.
        limit: upper bound of its steps, if there is one.
        files: name of each file of the checkpoint -> its SHA-256.
        interrupted: whether a signal came before the samples and held-out losses of its step.
    """

    quiet: ClassVar[bool] = True  # a training that resumes reports damaged checkpoints
    step: int
    loss_start: float
    seconds: Amount
    course: str = ""
    length: float = 0
    limit: int | None = None
    files: dict[str, str] = Field({})
    interrupted: bool = False


def folders(checkpoints: Path) -> list[tuple[int, Path]]:
    """Return step and folder of each checkpoint, newest first."""
    if not checkpoints.is_dir():
        return []
    matches = [(_NAME.fullmatch(folder.name), folder) for folder in checkpoints.iterdir()]
    return sorted(((int(match[1]), folder) for match, folder in matches if match), reverse=True)


def find(checkpoints: Path, wanted: Parts) -> list[tuple[Path, Progress]]:
    """Return folder and progress of the checkpoints with these parts, newest first."""
    return _fitting(checkpoints, lambda progress: progress.parts == wanted)


def _fitting(checkpoints: Path, fits: Callable[[Progress], bool]) -> list[tuple[Path, Progress]]:
    fitting = []
    for step, folder in folders(checkpoints):
        progress = Progress.read(folder / PROGRESS)
        if progress is not None and progress.step == step and fits(progress):
            fitting.append((folder, progress))
    return fitting


def resumable(order: TrainingOrder, wanted: Parts) -> list[tuple[Path, Progress]]:
    """Return folder and progress of the checkpoints that a training can resume from, newest first.

    These are its own checkpoints, and those of shorter trainings that are otherwise equal.
    """
    course, limit = order.course_digest(), order.trainer.step_limit or math.inf

    def fits(progress: Progress) -> bool:
        if progress.parts == wanted:
            return True
        if progress.parts | {"settings": wanted["settings"]} != wanted:
            return False
        shorter = progress.length <= order.length and (progress.limit or math.inf) <= limit
        return progress.course == course and shorter

    return _fitting(RunFiles(order).checkpoints, fits)


def as_begun(order: Order, data: str) -> Order:
    """Return an order whose `mixed_precision: auto` is replaced by the precision used before.

    The precision is taken from a finished, previous or begun training that is otherwise equal.
    Without such a training, or with another `mixed_precision`, the order is returned as it is.
    `data` is the digest of the run's caches.
    """
    if order.trainer.mixed_precision != "auto":
        return order
    files = RunFiles(order)
    chosen = [order.with_settings(mixed_precision=name) for name in ("bf16", "fp16", "no")]
    candidates = [(candidate, candidate.wanted(data)) for candidate in chosen]
    for result in (files, *files.before()):
        parts = parts_in(result.record) if result.is_complete else None
        for candidate, own in candidates:
            if parts == own and (result is files or not files.is_forced(own)):
                return candidate
    begun = (candidate for candidate, own in candidates if resumable(candidate, own))
    return next(begun, order)
