"""Checkpoints: a killed training resumes from them to the same weights.

A checkpoint is a folder `step-000500` with the trained weights, the state of the optimizer and a
small JSON. It is written under another name and renamed, so that the name stands for a complete
one. Random states are not in it: they follow from seed and step.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from latentmake.errors import TrainingError
from latentmake.files import atomic
from latentmake.training.json_file import JsonFile
from latentmake.training.loop.result import CHECKPOINT_STATE, CHECKPOINT_WEIGHTS, History
from latentmake.training.order import Wanted

__all__ = ["Checkpoint", "Progress", "State", "find", "load", "prune", "read", "save"]

_NAME = re.compile(r"step-(\d{6,})")
_PROGRESS = "progress.json"


State = tuple[dict[str, torch.Tensor], dict[str, Any]]
"""The trained weights by name, and the state of optimizer, learning rate, EMA and scaler."""


class Progress(JsonFile):
    """Progress of a training.

    Attributes:
        seconds: time spent on steps so far.
    """

    wanted: Wanted
    step: int
    loss_start: float
    seconds: float
    history: History


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
    fitting = []
    for step, folder in _folders(checkpoints):
        progress = Progress.read(folder / _PROGRESS)
        if progress is not None and progress.wanted == wanted and progress.step == step:
            fitting.append(Checkpoint(folder, progress))
    return fitting


def load(checkpoint: Checkpoint) -> State | None:
    """Return the state of a training, or None if the files are damaged."""
    try:
        weights = load_file(checkpoint.folder / CHECKPOINT_WEIGHTS)
        file = checkpoint.folder / CHECKPOINT_STATE
        return weights, torch.load(file, map_location="cpu", weights_only=True)
    except (OSError, SafetensorError, RuntimeError, EOFError, ValueError):
        return None


def read(folder: Path) -> tuple[Checkpoint, State]:
    """Read a checkpoint of any training, by its folder.

    Raises:
        TrainingError: it is missing, damaged or no checkpoint.
    """
    hint = "name a folder such as runs/NAME/checkpoints/step-000500"
    progress = Progress.read(folder / _PROGRESS)
    if progress is None:
        raise TrainingError("is no checkpoint, or a damaged one", where=folder, hint=hint)
    found = Checkpoint(folder, progress)
    state = load(found)
    if state is None:
        raise TrainingError("this checkpoint is damaged", where=folder, hint=hint)
    return found, state


def save(checkpoints: Path, progress: Progress, state: State) -> None:
    """Write a checkpoint; one of another training at the same step is replaced."""
    with atomic.replacing_folder(checkpoints / f"step-{progress.step:06d}") as new:
        save_file(state[0], new / CHECKPOINT_WEIGHTS)
        with (new / CHECKPOINT_STATE).open("wb") as file:  # so that a full disk is an OSError
            torch.save(state[1], file)
        progress.write(new / _PROGRESS)
        atomic.open_to_group(new)


def prune(checkpoints: Path, wanted: Wanted, keep: int, *, others: bool) -> None:
    """Remove all but the `keep` newest checkpoints of this training, and those of others if so."""
    ours = [each.folder for each in find(checkpoints, wanted)]
    removed = ours[keep:]
    if others:
        removed += [folder for _, folder in _folders(checkpoints) if folder not in ours]
        removed += checkpoints.glob(f".*{atomic.TEMPORARY_SUFFIX}")
    for folder in removed:
        shutil.rmtree(folder, ignore_errors=True)
