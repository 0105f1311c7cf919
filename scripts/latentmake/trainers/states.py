"""The trainer's output folder before and after a training: old results, and states to go on from.

musubi-tuner names a state `{name}-{epoch:06d}-state`, or `{name}-state` at the end. Resumed, it
loads weights, moments and schedule, but counts epochs from one again: told to train 16, it trains
16 more, and writes its states over those of the same number. So it is told how many are left, and
the state that it goes on from is moved out of its way. Later versions and forks write into a state
how far it came, and count on by themselves; those are left alone.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict, ValidationError

from latentmake import cachefile
from latentmake.trainers.launched import Layout
from latentmake.trainers.order import Wanted

__all__ = ["Resume", "prepare", "set_aside", "tidy"]


class Resume(NamedTuple):
    """Where a training goes on.

    Attributes:
        state: folder of the state; None at the beginning.
        done: epochs that the trainer does not know are done.
    """

    state: Path | None = None
    done: int = 0


class _Progress(BaseModel):
    """What the states in the trainer's folder belong to, and the epochs before their counting."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    wanted: Wanted
    done: int = 0


def prepare(layout: Layout, run: str, want: Wanted) -> Resume:
    """Make the trainer's folder ready for a training, and find the state it goes on from.

    What an earlier training left is moved into `layout.aside`, so that it can be taken neither for
    the new result nor for its state.

    Args:
        layout: the run's files.
        run: its name, which the trainer's files begin with.
        want: what is to be trained.

    Raises:
        StorageError: the disk is full or cannot be written.
        OSError: anything else the system refuses.
    """
    layout.work.mkdir(parents=True, exist_ok=True)
    progress = _read(layout.progress)
    same = progress is not None and progress.wanted == want
    for path in _results(layout.work, run):
        # The last LoRA must be a new one; the other files may be those of this very training.
        if not same or path == layout.trained:
            _move(path, layout.aside / path.name)
    if not same and layout.resumed.exists():
        shutil.rmtree(layout.resumed)
    resume = Resume()
    if same and progress is not None:
        resume = _resume(layout, run, progress.done)
    text = _Progress(wanted=want, done=resume.done).model_dump_json(indent=2)
    cachefile.write(layout.progress, f"{text}\n".encode())
    return resume


def set_aside(layout: Layout, run: str) -> None:
    """Move what an earlier training left into `layout.aside`, so that it is not taken for the new.

    Raises:
        OSError: the system refuses.
    """
    layout.work.mkdir(parents=True, exist_ok=True)
    for path in _results(layout.work, run):
        _move(path, layout.aside / path.name)


def tidy(layout: Layout) -> None:
    """Remove what was kept until there is a new LoRA: earlier results, and the state gone on from.

    Raises:
        OSError: the system refuses.
    """
    for folder in (layout.aside, layout.resumed):
        if folder.exists():
            shutil.rmtree(folder)


def _read(path: Path) -> _Progress | None:
    try:
        return _Progress.model_validate_json(path.read_bytes())
    except (OSError, ValidationError):
        return None


def _results(folder: Path, run: str) -> list[Path]:
    """Return LoRAs and states of the trainer."""
    name = re.compile(rf"{re.escape(run)}(-\d+|-step\d+)?(\.safetensors|-state)")
    return sorted(path for path in folder.iterdir() if name.fullmatch(path.name))


def _move(path: Path, to: Path) -> None:
    to.parent.mkdir(parents=True, exist_ok=True)
    if to.is_dir():
        shutil.rmtree(to)
    path.replace(to)


def _resume(layout: Layout, run: str, done: int) -> Resume:
    for state in _states(layout.work, run):
        if _counts_itself(state):
            return Resume(state)
        number = re.fullmatch(rf"{re.escape(run)}-(\d+)-state", state.name)
        if number is None:
            continue  # how many epochs it stands for is not known
        moved = layout.resumed / state.name
        if layout.resumed.exists():
            shutil.rmtree(layout.resumed)
        _move(state, moved)
        for other in _states(layout.work, run):
            shutil.rmtree(other)
        return Resume(moved, done + int(number[1]))
    if layout.resumed.is_dir():
        for state in _states(layout.resumed, run):
            return Resume(state, done)
    return Resume()


def _states(folder: Path, run: str) -> Iterator[Path]:
    """Yield whole states, the newest first."""
    states = [path for path in _results(folder, run) if path.is_dir()]
    for state in sorted(states, key=_newest, reverse=True):
        names = {path.name for path in state.iterdir()}
        accelerates = "optimizer.bin" in names
        # accelerate writes the state of random numbers last.
        if names and (not accelerates or any(name.startswith("random_states") for name in names)):
            yield state


def _newest(folder: Path) -> int:
    return max(path.stat().st_mtime_ns for path in [folder, *folder.iterdir()])


def _counts_itself(state: Path) -> bool:
    """Tell whether a state says how far it came; one of accelerate's files alone does not."""
    if not any(state.glob("random_states*")) and not (state / "optimizer.bin").exists():
        return True
    for path in state.glob("*.json"):
        try:
            content = json.loads(path.read_bytes())
        except (OSError, ValueError):
            continue
        if isinstance(content, dict) and not {"epoch", "current_epoch", "global_step"}.isdisjoint(
            content
        ):
            return True
    return False
