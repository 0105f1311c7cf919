"""States from which a killed training goes on as if nothing had happened.

A checkpoint is a folder `step-000500` with the trained weights, the state of the optimiser and a
small JSON. It is written under another name and renamed, so that what bears the name is whole.
Random states are not in it: they follow from seed and step.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from latentmake.errors import TrainingError, storage_error
from latentmake.files import atomic
from latentmake.training.order import Wanted
from latentmake.training.result import CHECKPOINT_STATE, CHECKPOINT_WEIGHTS, History

__all__ = ["Checkpoint", "Progress", "State", "find", "load", "prune", "read", "save"]

_NAME = re.compile(r"step-(\d{6,})")
_PROGRESS = "progress.json"


State = tuple[dict[str, torch.Tensor], dict[str, Any]]
"""The trained weights by name, and the state of optimiser, learning rate, average and scaler."""


class Progress(BaseModel):
    """How far a training has come.

    Attributes:
        seconds: time spent on steps so far.
    """

    model_config = ConfigDict(extra="forbid")
    wanted: Wanted
    step: int
    loss_start: float
    seconds: float
    history: History


class Checkpoint(BaseModel):
    """A checkpoint folder and what it says of itself."""

    model_config = ConfigDict(frozen=True)
    folder: Path
    progress: Progress


def _folders(checkpoints: Path) -> list[tuple[int, Path]]:
    """Return steps and folders, newest first."""
    if not checkpoints.is_dir():
        return []
    found = [
        (int(match[1]), folder)
        for folder in checkpoints.iterdir()
        if (match := _NAME.fullmatch(folder.name))
    ]
    return sorted(found, reverse=True)


def find(checkpoints: Path, wanted: Wanted) -> list[Checkpoint]:
    """Return the checkpoints of this very training, newest first."""
    fitting = []
    for step, folder in _folders(checkpoints):
        try:
            progress = Progress.model_validate_json((folder / _PROGRESS).read_bytes())
        except (OSError, ValidationError):
            continue
        if progress.wanted == wanted and progress.step == step:
            fitting.append(Checkpoint(folder=folder, progress=progress))
    return fitting


def load(checkpoint: Checkpoint) -> State | None:
    """Return the trained weights and the optimiser's state, or None if a power failure cut it."""
    try:
        weights = load_file(checkpoint.folder / CHECKPOINT_WEIGHTS)
        state = torch.load(
            checkpoint.folder / CHECKPOINT_STATE, map_location="cpu", weights_only=True
        )
    except (OSError, SafetensorError, RuntimeError, EOFError, ValueError):
        return None
    return weights, state


def read(folder: Path) -> tuple[Checkpoint, State]:
    """Read a checkpoint of any training, by its folder.

    Raises:
        TrainingError: it is missing, damaged or no checkpoint.
    """
    mend = "name a folder such as runs/NAME/checkpoints/step-000500"
    try:
        progress = Progress.model_validate_json((folder / _PROGRESS).read_bytes())
    except OSError:
        raise TrainingError("is no checkpoint", where=folder, mend=mend) from None
    except ValidationError:
        raise TrainingError("this checkpoint is damaged", where=folder, mend=mend) from None
    found = Checkpoint(folder=folder, progress=progress)
    state = load(found)
    if state is None:
        raise TrainingError("this checkpoint is damaged", where=folder, mend=mend)
    return found, state


def save(checkpoints: Path, progress: Progress, state: State) -> Path:
    """Write a checkpoint; one of another training at the same step gives way.

    Returns:
        Its folder.

    Raises:
        StorageError: the disk is full or cannot be written.
    """
    folder = checkpoints / f"step-{progress.step:06d}"
    partial = checkpoints / f".{folder.name}{atomic.TEMPORARY_SUFFIX}"
    try:
        checkpoints.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        save_file(state[0], partial / CHECKPOINT_WEIGHTS)
        with (partial / CHECKPOINT_STATE).open("wb") as file:  # so that a full disk is an OSError
            torch.save(state[1], file)
        atomic.write(partial / _PROGRESS, progress.model_dump_json(indent=2).encode())
        atomic.open_to_group(partial)
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
    except Exception as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise storage_error(error, folder) or error from None
    return folder


def prune(checkpoints: Path, wanted: Wanted, keep: int, *, others: bool) -> None:
    """Remove all but the newest `keep` checkpoints of this training.

    Args:
        checkpoints: the folder of all.
        wanted: what this training trains.
        keep: how many stay.
        others: remove those of other trainings too.
    """
    ours = [each.folder for each in find(checkpoints, wanted)]
    for folder in ours[keep:]:
        shutil.rmtree(folder, ignore_errors=True)
    if others:
        for _, folder in _folders(checkpoints):
            if folder not in ours:
                shutil.rmtree(folder, ignore_errors=True)
        for partial in checkpoints.glob(f".*{atomic.TEMPORARY_SUFFIX}"):
            shutil.rmtree(partial, ignore_errors=True)
