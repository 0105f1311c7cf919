"""Checkpoints: a killed or a longer training resumes from them to the same weights.

A checkpoint is a folder `step-000500` with the trained weights, the state of the optimizer and a
small JSON. It is written under another name and renamed, so that the name stands for a complete
one. Random states are not in it: they follow from seed and step.

No torch is imported before a checkpoint is loaded or saved: the planner looks for checkpoints too.
"""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeAlias

from pydantic import Field

from latentmake import digest
from latentmake.errors import is_out_of_memory
from latentmake.files import atomic
from latentmake.plan.receipts import Amount
from latentmake.training.loop.order import Order, TrainingOrder
from latentmake.training.loop.order import wanted as wanted_by
from latentmake.training.order import JsonFile, RunFiles, Wanted

if TYPE_CHECKING:
    import torch

_NAME = re.compile(r"step-(\d{6,})(-\d+)?")
_PROGRESS = "progress.json"
_WEIGHTS = "weights.safetensors"
_STATE = "state.pt"

State: TypeAlias = "tuple[dict[str, torch.Tensor], dict[str, Any]]"
"""The trained weights by name, and the state of optimizer, learning rate, EMA and scaler."""


class Progress(JsonFile, extra="ignore"):  # earlier releases write more
    """Progress of a training; checkpoints of earlier releases lack what has a default.

    Attributes:
        seconds: time spent on steps so far.
        course: see `TrainingOrder.course_digest`.
        length: see `TrainingOrder.length`.
        limit: upper bound of its steps, where there is one.
        files: name of each file of the checkpoint -> its SHA-256.
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


class Checkpoint(NamedTuple):
    """A checkpoint folder and its progress."""

    folder: Path
    progress: Progress


def _folders(checkpoints: Path) -> list[tuple[int, Path]]:
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
    for step, folder in _folders(checkpoints):
        progress = Progress.read(folder / _PROGRESS)
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


def newest(
    order: TrainingOrder, wanted: Wanted, steps: int, say: Callable[[str], None]
) -> tuple[Checkpoint, State] | None:
    """Return the newest undamaged checkpoint that a training can resume from, and its state.

    On more devices the same epochs have fewer steps. `say` takes a line about each damaged one.
    """
    for _, folder in _folders(RunFiles(order).checkpoints):
        if Progress.read(folder / _PROGRESS) is None:
            say(f"{folder} is damaged and skipped")
    for found in resumable(order, wanted):
        if found.progress.wanted != wanted and found.progress.step > steps:
            continue
        state = load(found)
        if state is not None:
            return found, state
        say(f"{found.folder} is damaged and skipped")
    return None


def load(checkpoint: Checkpoint) -> State | None:
    """Return the state of a training, or None if the files are damaged."""
    import torch
    from safetensors.torch import load_file

    try:
        for name, known in checkpoint.progress.files.items():
            if digest.of_file(checkpoint.folder / name) != known:
                return None
        weights = load_file(checkpoint.folder / _WEIGHTS)
        file = checkpoint.folder / _STATE
        return weights, torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # unpickling a file that is no archive raises nearly anything
        if isinstance(error, MemoryError) or is_out_of_memory(str(error)):
            raise
        return None


def save(checkpoints: Path, progress: Progress, state: State) -> None:
    """Write a checkpoint; one of another training at the same step is replaced.

    Its progress gets the digests of the files.
    """
    import torch
    from safetensors.torch import save_file

    with atomic.replacing_folder(checkpoints / f"step-{progress.step:06d}") as new:
        save_file(state[0], new / _WEIGHTS)
        with (new / _STATE).open("wb") as file:  # so that a full disk is an OSError
            torch.save(state[1], file)
        digests = {name: digest.of_file(new / name, quiet=True) for name in (_WEIGHTS, _STATE)}
        progress.model_copy(update={"files": digests}).write(new / _PROGRESS)


def prune(checkpoints: Path, wanted: Wanted, keep: int, *, others: bool = False) -> None:
    """Remove all but the `keep` newest checkpoints of this training, and those of others if so."""
    ours = [each.folder for each in find(checkpoints, wanted)]
    removed = ours[keep:]
    if others:
        removed += [folder for _, folder in _folders(checkpoints) if folder not in ours]
        removed += checkpoints.glob(f".*{atomic.TEMPORARY_SUFFIX}")
    for folder in removed:
        shutil.rmtree(folder, ignore_errors=True)


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
