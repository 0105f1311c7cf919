"""Trainings by the names that commands take: `cats`, `cats@2`, or a file of weights."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

from latentmake.base import digest
from latentmake.base.errors import ConfigError, TrainingError
from latentmake.commands.project import run_names
from latentmake.config.root import Config
from latentmake.formats.safetensors import read_head
from latentmake.plan.manifest import result_folder
from latentmake.runs.history import all_trainings, remembered, trainings, weights_of
from latentmake.runs.ledger import began
from latentmake.runs.order import RECORD, Record

_NAME = re.compile(r"(.+?)(?:@(\d+))?")
_HEADER = "latentmake.training"
"""Key in the header of weights: name of the training's folder in the history."""


class Training(NamedTuple):
    """A training in the history of a run.

    Attributes:
        name: name by which the user or this program calls it.
        folder: its folder in the history, or that of its weights.
    """

    name: str
    run: str
    folder: Path
    record: Record

    def values(self) -> dict[str, Any]:
        """Return what `--json` prints of it."""
        weights = [str(path) for path in weights_of(self.run, self.record)]
        own = {"name": self.name, "run": self.run, "folder": str(self.folder)}
        return {**own, "began": began(self.folder, self.record), "weights": weights}


def finished(run: str) -> list[Training]:
    """Return the finished trainings of a run, newest first.

    If the run has taken back the weights of an earlier training, that training is the first one.
    """
    ended = [Training(run, run, *pair) for pair in trainings(run) if not pair[1].ended]
    ended.sort(key=is_present, reverse=True)
    return [
        training._replace(name=f"{run}@{number}") if number else training
        for number, training in enumerate(ended)
    ]


def is_present(training: Training) -> bool:
    """Whether a training made the present result of its run."""
    present = Record.read(result_folder(training.run) / RECORD)
    if present is None or present.parts != training.record.parts:
        return False
    return present.roster in ("", training.record.roster)  # earlier releases have no roster


def training_of(config: Config, text: str) -> Training:
    """Return the training that a user names.

    Args:
        config: configuration of the project.
        text: a run (its last finished training), `cats@2` (two trainings before that), or the path
            of trained weights.

    Raises:
        ConfigError: there is neither such a run nor such a file.
        TrainingError: the run has not so many finished trainings, or no training wrote the file.
    """
    match = _NAME.fullmatch(text)
    run, number = (match[1], int(match[2] or 0)) if match else (text, 0)
    if run not in {*config.runs, *remembered()}:
        path = Path(text)
        if path.exists():
            return _of_weights(path)
        if path.suffix or len(path.parts) > 1:
            raise ConfigError("there is no such file", where=text, hint="check the path")
        run_names(config, [run])
    named = finished(run)
    if not named:
        hint = f"train it: snakemake --cores all train_{run}"
        raise TrainingError("has no finished training yet", where=run, hint=hint)
    if number >= len(named):
        count = f"{len(named)} finished trainings" if len(named) > 1 else "1 finished training"
        hint = f"the oldest is {named[-1].name}"
        raise TrainingError(f"the history of {run} has {count}", where=text, hint=hint)
    return named[number]


def _of_weights(path: Path) -> Training:
    """Return the training that wrote a file, or a folder of files, wherever it is now."""
    for file in sorted(path.rglob("*.safetensors")) if path.is_dir() else [path]:
        if match := recognised(file):
            return match[0]._replace(name=str(path))
    hint = "name a run, or the folder of its project with --directory"
    raise TrainingError("no training in runs/*/history wrote this file", where=path, hint=hint)


def recognised(file: Path) -> tuple[Training, str] | None:
    """Return the training that wrote a file, and how it was recognised; None if it is unknown.

    A file is recognised by its digest, or by its header if another program changed it since.
    """
    name, noted = _noted(file), [Training(str(file), *row) for row in all_trainings()]
    named = [training for training in noted if name and training.folder.name == name]
    same: list[Training] = []
    if any(training.record.files for training in noted):
        content = digest.of_file(file, quiet=True)
        same = [training for training in noted if content in training.record.files.values()]
    candidates = [training for training in same if training in named] or same or named
    how = "by the digest of the file" if same else "by its header"
    return (candidates[0], how) if candidates else None


def _noted(file: Path) -> str:
    """Return the name of the training's folder in the header of a file; "" if it has none."""
    try:
        return str(read_head(file).metadata.get(_HEADER, ""))
    except (OSError, ValueError):
        return ""
