"""Trainings by the names that commands take: `cats`, `cats@2`, or a file of weights."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from latentmake.base import digest
from latentmake.base.errors import ConfigError, TrainingError
from latentmake.base.machine import counted
from latentmake.commands.project import plan_of, run_names
from latentmake.config.root import Config
from latentmake.formats.cachefile import read_metadata
from latentmake.plan.facts import Facts
from latentmake.plan.product import Difference, judge
from latentmake.runs.edited import with_items
from latentmake.runs.history import RosterItem, Training, all_trainings, remembered, trainings
from latentmake.runs.order import RunOrder

_NAME = re.compile(r"(.+?)(?:@(\d+))?")


def finished(run: str) -> list[Training]:
    """Return the finished trainings of a run, newest first.

    If the run has taken back the weights of an earlier training, that training is the first one.
    """
    ended = [training for training in trainings(run) if not training.record.ended]
    ended.sort(key=lambda training: training.is_present, reverse=True)
    names = (f"{run}@{number}" if number else run for number in range(len(ended)))
    return [one._replace(name=name) for one, name in zip(ended, names, strict=True)]


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
        hint = f"train it: latentmake build {run}"
        raise TrainingError("has no finished training yet", where=run, hint=hint)
    if number >= len(named):
        count, hint = counted(len(named), "finished training"), f"the oldest is {named[-1].name}"
        raise TrainingError(f"the history of {run} has {count}", where=text, hint=hint)
    return named[number]


def _of_weights(path: Path) -> Training:
    """Return the training that wrote a file, or a folder of files, wherever it is now."""
    for file in sorted(path.rglob("*.safetensors")) if path.is_dir() else [path]:
        if match := recognised(file, read_metadata(file)):
            return match[0]._replace(name=str(path))
    hint = "name a run, or the folder of its project with --directory"
    raise TrainingError("no training in runs/*/history wrote this file", where=path, hint=hint)


def recognised(file: Path, metadata: Mapping[str, Any]) -> tuple[Training, str] | None:
    """Return the training that wrote a file, and how it was recognised; None if it is unknown.

    A file is recognised by its digest, or by the metadata in its header if another program changed
    it since.
    """
    noted = [*all_trainings()]
    name = metadata.get("latentmake.training")
    named = [training for training in noted if training.folder.name == name]
    same: list[Training] = []
    if any(training.record.files for training in noted):
        content = digest.of_file(file, quiet=True)
        same = [training for training in noted if content in training.record.files.values()]
    candidates = [training for training in same if training in named] or same or named
    how = "by the digest of the file" if same else "by its header"
    return (candidates[0], how) if candidates else None


def differences_today(
    facts: Facts, training: Training, items: list[RosterItem] | None
) -> list[Difference]:
    """Return how a run differs today from one of its trainings, which saw these items.

    Numbers of edited items stand in the place of the digests of their caches.
    """
    plan, record = plan_of(facts, [training.run]).runs[training.run], training.record
    if training.is_present:
        return plan.reasons
    if not isinstance(plan.trainer, RunOrder):
        return []
    # While caches are outdated, the items tell what differs.
    today = plan.trainer.product_since(record, plan.lock or record.dataset)
    differences = judge(today._replace(files=()), record)
    return with_items(facts, training.run, items or (), differences)
