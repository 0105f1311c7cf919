"""Origin of a file of trained weights, for `explain`: which training made it, and on what.

A file is recognised by its header, or by its digest in the history of a run. So it may have another
name and lie anywhere. A file of another program is explained as far as its header tells.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import typer

from latentmake.base.errors import SourceError, UserError, escaped
from latentmake.commands.file_origin import Explanation
from latentmake.commands.named_trainings import recognised
from latentmake.commands.project import plan_of
from latentmake.formats.cachefile import KEY
from latentmake.formats.safetensors import Head, read_head
from latentmake.plan.facts import Facts
from latentmake.plan.product import Difference, judge, short, some
from latentmake.runs.edited import item_differences
from latentmake.runs.history import RosterItem, items_of
from latentmake.runs.order import Record, RunOrder

_SHOWN = 3  # captions in a line each
_LONGEST = 100  # most characters of a value of a header
_ROWS = {
    "modelspec.title": "title",
    "modelspec.trigger_phrase": "trigger",
    "modelspec.author": "author",
    "modelspec.license": "license",
    "modelspec.architecture": "model",
    "ss_base_model_version": "model",
    "ss_sd_model_name": "base",
    "ss_new_sd_model_hash": "base",
    "modelspec.resolution": "resolution",
}
"""Key of a header -> label of its line."""
_SETTINGS = (
    *("ss_network_module", "ss_network_dim", "ss_network_alpha", "ss_learning_rate"),
    *("ss_optimizer", "ss_lr_scheduler", "ss_steps", "ss_num_epochs", "ss_seed"),
)
_NAMED = (
    *("rank", "alpha", "network_dim", "network_alpha", "learning_rate", "optimizer"),
    *("optimizer_type", "lr_scheduler", "steps", "epochs", "max_train_steps", "max_train_epochs"),
    *("train_batch_size", "batch_size", "seed"),
)
"""Settings of trainers that are named, of all that a record has."""


class Training:
    """Training that made a file, as far as it is known.

    Attributes:
        run: name of the run; "" if unknown.
        record: record in the history; None if the run or its history is gone.
        items: items that it saw; None if they are unknown.
        known_by: how the training was found.
    """

    def __init__(self, path: Path, metadata: Mapping[str, str]) -> None:
        self.run = metadata.get("latentmake.run", "")
        self.name = metadata.get("latentmake.training", "")
        self.record: Record | None = None
        self.items: list[RosterItem] | None = None
        self.known_by = ""
        if match := recognised(path):
            training, self.known_by = match
            self.run, self.name, self.record = training.run, training.folder.name, training.record
            self.items = items_of(training.folder)


@dataclass
class WeightsExplanation(Explanation):
    """Explanation of a file of trained weights."""

    title: str = ""
    run: str = ""
    training: str = ""  # name of its folder in the history
    record: dict[str, Any] = field(default_factory=dict)  # record of the training, if known
    items: list[dict[str, Any]] = field(default_factory=list)  # items of the roster
    metadata: dict[str, str] = field(default_factory=dict)  # header of the file
    described: list[tuple[str, str]] = field(default_factory=list)  # labels and texts of lines

    def values(self) -> dict[str, object]:
        """Return the explanation as JSON values."""
        values = super().values()
        del values["described"]
        return values

    def _rows(self) -> Iterator[tuple[str, str]]:
        for label, text in self.described:
            yield label, escaped(text)
        for difference in self.differences:
            label = "differs" if difference.old != difference.new else "because"
            yield label, str(difference)


def open_page(facts: Facts | None, explanation: Explanation) -> None:
    """Write a page of the items that made a file of weights, and open it in a browser.

    Raises:
        SourceError: the items are unknown.
    """
    from latentmake.pages.roster_page import write_roster_page

    assert isinstance(explanation, WeightsExplanation)
    items = [RosterItem.model_validate(item) for item in explanation.items]
    if not items:
        raise SourceError(
            "the items of these weights are not known here",
            where=explanation.path,
            hint="run the command in the folder of their project",
        )
    path = write_roster_page(facts, Path(explanation.path).name, explanation.described, items)
    explanation.described.append(("page", str(path)))
    typer.launch(path.absolute().as_uri())


def is_weights(path: str, *, of_run: bool = False) -> bool:
    """Whether a path is a safetensors file that is no cache file of ours.

    Raises:
        SourceError: it is a damaged safetensors file. A damaged file `of_run` is no error, since
            the next build makes it again.
    """
    place, caches = os.path.realpath(path), os.path.realpath("cache")
    if not path.endswith(".safetensors") or place.startswith(f"{caches}/"):
        return False
    if not Path(path).is_file():
        return False
    try:
        return KEY not in read_head(path).metadata
    except ValueError as error:
        if of_run:
            return False
        raise SourceError(str(error), where=path) from None


def explained(facts: Facts | None, path: str, of_run: Explanation | None) -> WeightsExplanation:
    """Explain a file of weights.

    Args:
        facts: facts about the project; None outside of a project.
        path: path of the file.
        of_run: explanation of the file as one of a run's folder; None elsewhere.
    """
    head = read_head(path)
    metadata = {key: str(value) for key, value in head.metadata.items()}
    training = Training(Path(path), metadata)
    lines = [*_of_training(training, metadata), *_of_header(head, metadata, training)]
    state, reason, differences = "unknown", "", list[Difference]()
    if of_run is not None:
        state, reason, differences = of_run.state, of_run.reason, of_run.differences
    elif training.record is None:
        reason = "no training of this folder made it"
        if not metadata.get("latentmake.run"):
            reason = f"{reason}; another program may have" if metadata else "has no metadata"
    elif facts is not None:
        state, reason, differences = _today(facts, training.run, training.record, training.items)
    values = training.record.model_dump(mode="json") if training.record else {}
    return WeightsExplanation(
        os.path.relpath(path),
        state,
        reason,
        differences,
        runs=[training.run] if training.record else [],
        title=metadata.get("modelspec.title", ""),
        run=training.run,
        training=training.name,
        record=values,
        items=[item.model_dump(mode="json") for item in training.items or ()],
        metadata=metadata,
        described=lines,
    )


def _of_training(training: Training, metadata: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield lines about the training of a file: run, date, settings, items and captions."""
    record = training.record
    if training.run:
        how = training.known_by or "by its header; the history of the run is not here"
        yield "run", f"{training.run}, recognised {how}"
    if record is not None:
        yield "training", f"{training.name} of {_when(record.began)}{_course(record)}"
        if record.ended:
            yield "training", f"did not finish: {record.ended}"
        settings = record.values.get("settings", {})
        values = ((name, settings.get(name, "none")) for name in _NAMED)
        words = (f"{name} {value}" for name, value in values if value != "none")
        yield "settings", ", ".join(words)
        parts = {name: value for name, value in record.parts.items() if name != "settings"}
        places = {name: f" ({place})" for name, place in record.places.items() if place}
        words = (f"{name} {short(str(parts[name]))}{places.get(name, '')}" for name in parts)
        yield "made of", ", ".join(words)
    elif training.name:
        yield "training", training.name
    captions = _captions(training.items, metadata)
    numbers = Counter(item.dataset for item in training.items or () if not item.validation)
    if numbers:
        words = (f"{name} {number}" for name, number in numbers.items())
        yield "items", f"{sum(numbers.values())} ({', '.join(words)})"
    elif number := metadata.get("latentmake.items"):
        yield "items", number
    for name, text in captions[:_SHOWN]:
        yield "caption", f"{name}: {json.dumps(text, ensure_ascii=False)}"
    if len(captions) > _SHOWN:
        yield "caption", f"and {len(captions) - _SHOWN} more; `--open` shows all"


def _when(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds).astimezone():%Y-%m-%d %H:%M:%S}"


def _course(record: Record) -> str:
    """Return steps, time, device and loss of a training, as far as they are known."""
    words = []
    if record.steps:
        words.append(f"{record.steps} steps")
    if record.seconds:
        words.append(str(timedelta(seconds=round(record.seconds))))
    if record.device:
        words.append(f"on {record.device}")
    if record.loss_start is not None and record.loss_end is not None:
        words.append(f"loss {record.loss_start:.4f} -> {record.loss_end:.4f}")
    return "".join(f", {word}" for word in words)


def _captions(
    items: Sequence[RosterItem] | None, metadata: Mapping[str, str]
) -> list[tuple[str, str]]:
    """Return name and first text of each item, from the history or a header with captions."""
    if items is not None:
        return [
            (f"{item.dataset}/{item.stem}", item.texts[0] if item.texts else "") for item in items
        ]
    texts = _json(metadata, "latentmake.captions")
    return [(name, str(own[0]) if own else "") for name, own in texts.items()]


def _of_header(
    head: Head, metadata: Mapping[str, str], training: Training
) -> Iterator[tuple[str, str]]:
    """Yield lines about what the header says, in whichever program's keys."""
    said: dict[str, list[str]] = {}
    for key, label in _ROWS.items():
        if value := metadata.get(key, "").removeprefix("None"):
            said.setdefault(label, []).append(short(value)[:_LONGEST])
    yield from ((label, ", ".join(values)) for label, values in said.items())
    if training.record is None:
        began = metadata.get("ss_training_started_at", "")
        with suppress(ValueError, OverflowError, OSError):
            yield "trained", _when(float(began))
        if not began and (date := metadata.get("modelspec.date")):
            yield "trained", date
        named = ((key.removeprefix("ss_"), metadata.get(key, "None")) for key in _SETTINGS)
        if words := [f"{name} {value}"[:_LONGEST] for name, value in named if value != "None"]:
            yield "settings", ", ".join(words)
    dirs = _json(metadata, "ss_dataset_dirs")
    if training.items is None and (words := [*_folders(dirs)]):
        yield "folders", ", ".join(words)
    counts = Counter[str]()
    for own in _json(metadata, "ss_tag_frequency").values():
        if isinstance(own, dict):
            counts.update({str(tag): n for tag, n in own.items() if isinstance(n, int)})
    if counts:
        yield "tags", some([f"{tag} ({count})" for tag, count in counts.most_common()])
    sizes = (entry.get("dtype", "?") for entry in head.entries.values())
    types = ", ".join(sorted({str(size) for size in sizes}))
    yield "tensors", f"{len(head.entries)} ({types})" if types else "0"


def _folders(dirs: Mapping[str, Any]) -> Iterator[str]:
    for name, values in dirs.items():
        count = values.get("img_count") if isinstance(values, dict) else None
        yield f"{name} ({count} images)" if count is not None else name


def _json(metadata: Mapping[str, str], key: str) -> dict[str, Any]:
    """Return the JSON object in a header's value; empty if it is none."""
    try:
        value = json.loads(metadata.get(key, "{}"))
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _today(
    facts: Facts, run: str, record: Record, items: Sequence[RosterItem] | None
) -> tuple[str, str, list[Difference]]:
    """Return state, reason and differences of a training from the project of today."""
    if run not in facts.config.runs or facts.config.runs[run].trainer is None:
        return "unknown", f"the configuration has no training of {run} today", []
    try:
        plan = plan_of(facts, [run]).runs[run]
        order, counted = plan.trainer, [*item_differences(facts, run, items or ())]
        if not isinstance(order, RunOrder):
            return "unknown", "", []
        # While caches are outdated, the items tell what differs.
        today = order.product_since(record, plan.lock or record.dataset)
        differences = judge(today._replace(files=()), record)
    except UserError as error:
        return "unknown", f"today's plan cannot be made: {error.what}", []
    named = {"dataset", *today.values["dataset"]}
    if counted:
        differences = [*counted, *(change for change in differences if change.name not in named)]
    if differences:
        return "stale", f"{run} would be trained differently today", differences
    return "fresh", "trained; nothing differs", []
