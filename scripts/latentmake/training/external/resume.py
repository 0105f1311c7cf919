"""Resume support for the `-state` folders of external trainers.

musubi-tuner and sd-scripts name a state `{name}-{epoch:06d}-state`, or `{name}-state` at the end.
The number decides which is the last; mtimes never do. musubi-tuner, and sd-scripts' scripts for
complete networks, count epochs from one again after a resume: told to train 16, they train 16 more,
and write their states over those of the same number. So they are told how many are left, and all
states are moved out of their way, under the number of epochs that stand behind them. Other scripts,
later versions and forks write into a state how far it came.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from latentmake.training.order import JsonFile, Wanted
from latentmake.training.record import RunFiles

_KEPT = 2  # states: the one to resume from, and one more should it be damaged


class Resume(NamedTuple):
    """Where a training is resumed.

    Attributes:
        state: folder of the state; None at the beginning.
        done: epochs that stand behind it.
        counted: whether the state itself says how far it came.
        steps: optimizer steps of an epoch, where a state tells; else 0.
    """

    state: Path | None = None
    done: int = 0
    counted: bool = False
    steps: int = 0


class _Progress(JsonFile):
    """File beside the states: their training, and the epochs done when it was last started."""

    wanted: Wanted
    epochs: int = 0
    steps: int = 0


def belongs(files: RunFiles, want: Wanted) -> bool:
    """Whether the files in the trainer's folder come from this training."""
    progress = _Progress.read(files.progress)
    return progress is not None and progress.wanted == want


def prepare(
    files: RunFiles,
    want: Wanted,
    *,
    epochs: int | None,
    usable: Callable[[Resume], bool] = lambda resume: True,
) -> Resume:
    """Make the trainer's folder ready for a training, and find the state to resume from.

    What another training left is moved into `files.earlier`: it is taken neither for the new result
    nor for its state.

    Args:
        files: the run's files.
        want: what is to be trained.
        epochs: of the complete training; None where steps end it.
        usable: whether the trainer can be resumed right there.
    """
    files.work.mkdir(parents=True, exist_ok=True)
    progress = _Progress.read(files.progress)
    resume = Resume()
    if progress is None or progress.wanted != want:
        for path in _results(files):
            _move(path, files.earlier / path.name)
        if files.resumed.exists():
            shutil.rmtree(files.resumed)
    else:
        if files.last.exists():  # the last LoRA must be a new one
            _move(files.last, files.earlier / files.last.name)
        _collect(files, progress.epochs, epochs)
        found = [_resume(state, number, progress) for number, state in _collected(files)]
        resume = next(filter(usable, found), resume)
    _Progress(wanted=want, epochs=resume.done, steps=resume.steps).write(files.progress)
    return resume


def tidy(files: RunFiles) -> None:
    """Remove what was kept until there is a new LoRA: earlier results, and states resumed from."""
    for folder in (files.earlier, files.resumed):
        if folder.exists():
            shutil.rmtree(folder)


def _results(files: RunFiles) -> list[Path]:
    """Return the trainer's LoRAs and states."""
    name = re.compile(rf"{re.escape(files.run)}(-\d+|-step\d+)?(\.safetensors|-state)")
    return sorted(path for path in files.work.iterdir() if name.fullmatch(path.name))


def _move(path: Path, to: Path) -> None:
    to.parent.mkdir(parents=True, exist_ok=True)
    if to.is_dir():
        shutil.rmtree(to)
    path.replace(to)


def _collect(files: RunFiles, before: int, epochs: int | None) -> None:
    """Move complete states into `files.resumed`, under the number of epochs behind them.

    Killed at any time, it can be done again: the number of epochs before is written down last.

    Args:
        files: the run's files.
        before: epochs that were done when the trainer was last started.
        epochs: of the complete training, which `{run}-state` ends; None where that is not known.
    """
    for state in filter(Path.is_dir, _results(files)):
        number = _number(state, files.run)
        if state.name == f"{files.run}-state":
            number = epochs
        elif number is not None and not _counts(state):
            number += before
        if number is None:
            continue  # how many epochs it stands for is not known
        if _is_complete(state):
            _move(state, files.resumed / f"{files.run}-{number:06d}-state")
        else:
            shutil.rmtree(state)


def _collected(files: RunFiles) -> Iterator[tuple[int, Path]]:
    """Yield the collected states, the last first; remove all but two."""
    if not files.resumed.is_dir():
        return
    found = [(_number(state, files.run) or 0, state) for state in files.resumed.iterdir()]
    for index, (number, state) in enumerate(sorted(found, reverse=True)):
        if index < _KEPT:
            yield number, state
        else:
            shutil.rmtree(state)


def _number(state: Path, run: str) -> int | None:
    number = re.fullmatch(rf"{re.escape(run)}-(\d+)-state", state.name)
    return int(number[1]) if number else None


def _is_complete(state: Path) -> bool:
    """Whether a state was written to its end: accelerate writes random numbers last."""
    names = {path.name for path in state.iterdir()}
    accelerates = any(name.startswith(("optimizer", "scheduler", "model")) for name in names)
    return bool(names) and (
        not accelerates or any(name.startswith("random_states") for name in names)
    )


def _resume(state: Path, done: int, progress: _Progress) -> Resume:
    steps, trained = progress.steps, done - progress.epochs
    taken = _values(state).get("current_step")
    if trained > 0 and isinstance(taken, int):  # since the trainer was last started
        steps = taken // trained
    return Resume(state, done, _counts(state), steps)


def _counts(state: Path) -> bool:
    """Whether a state says how far it came; one of accelerate's files alone does not."""
    if not any(state.glob("random_states*")) and not (state / "optimizer.bin").exists():
        return True
    return not {"epoch", "current_epoch", "global_step"}.isdisjoint(_values(state))


def _values(state: Path) -> dict[str, Any]:
    """Return the values of the JSON files in a state."""
    found: dict[str, Any] = {}
    for path in sorted(state.glob("*.json")):
        try:
            content = json.loads(path.read_bytes())
        except (OSError, ValueError):
            continue
        if isinstance(content, dict):
            found |= content
    return found
