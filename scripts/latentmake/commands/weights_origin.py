"""Origin of a file of trained weights, for `explain`: which training made it, and on what.

A file is recognised by its header, or by its digest in the history of a run. So it may have another
name and lie anywhere. A file of another program is explained as far as its header tells.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from latentmake.base.errors import SourceError, UserError, escaped
from latentmake.commands.file_origin import Explanation
from latentmake.commands.named_trainings import differences_today, recognised
from latentmake.commands.project import show_page
from latentmake.formats.cachefile import KEY
from latentmake.formats.safetensors import Head, read_head
from latentmake.plan.facts import Facts
from latentmake.plan.product import short, some
from latentmake.runs.history import RosterItem, Training
from latentmake.runs.order import Record

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
_UNKNOWN = ("", "None", "NoSuchFile", "IsADirectory")  # sd-scripts writes them
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


@dataclass
class WeightsExplanation(Explanation):
    """Explanation of a file of trained weights; without a known training, its header tells all."""

    metadata: dict[str, str] = field(default_factory=dict)  # header of the file
    training: Training | None = None
    items: list[RosterItem] | None = None  # items of the training; None if they are unknown
    described: list[tuple[str, str]] = field(default_factory=list)  # labels and texts of lines

    def values(self) -> dict[str, object]:
        """Return the explanation as JSON values."""
        training, said, values = self.training, self.metadata, super().values()
        del values["described"]
        values |= {
            "title": said.get("modelspec.title", ""),
            "run": training.run if training else said.get("latentmake.run", ""),
            "training": said.get("latentmake.training", ""),
            "record": training.record.model_dump(mode="json") if training else {},
            "items": [item.model_dump(mode="json") for item in self.items or ()],
        }
        return values | ({"training": training.folder.name} if training else {})

    def _rows(self) -> Iterator[tuple[str, str]]:
        yield from ((label, escaped(text)) for label, text in self.described)
        yield from self._differing()

    def open_page(self, facts: Facts | None) -> None:
        """Write a page of the items that made the weights, and open it in a browser.

        Raises:
            SourceError: the items are unknown.
        """
        from latentmake.pages.roster_page import write_roster_page

        if not self.items:
            what = "the items of these weights are not known here"
            hint = "run the command in the folder of their project"
            raise SourceError(what, where=self.path, hint=hint)
        title = Path(self.path).name
        show_page(write_roster_page(facts, title, self.described, self.items), err=True)


def explained(
    facts: Facts | None, path: str, of_run: Explanation | None = None
) -> WeightsExplanation | None:
    """Explain a safetensors file of weights; return None for a cache file, or any other file.

    Args:
        facts: facts about the project; None outside of a project.
        path: path of the file.
        of_run: explanation of the file as one of a run's folder; None elsewhere.

    Raises:
        SourceError: it is a damaged safetensors file. A damaged file of a run is no error, since
            the next build makes it again.
    """
    head = _read(path, of_run is None)
    if head is None:
        return None
    metadata = {key: str(value) for key, value in head.metadata.items()}
    training, how = recognised(Path(path), metadata) or (None, "")
    explanation = WeightsExplanation(
        os.path.relpath(path),
        "unknown",
        runs=[training.run] if training else [],
        metadata=metadata,
        training=training,
        items=training.items if training else None,
    )
    explanation.described = [*_of_training(explanation, how), *_of_header(head, explanation)]
    if of_run is not None:
        explanation.state, explanation.reason = of_run.state, of_run.reason
        explanation.differences = of_run.differences
    elif training is not None and facts is not None:
        _compare(facts, training, explanation)
    elif training is None and not metadata:
        explanation.reason = "has no metadata"
    elif training is None:
        explanation.reason = "no training of this folder made it"
        if not metadata.get("latentmake.run"):
            explanation.reason += "; another program may have"
    return explanation


def _read(path: str, refuses: bool) -> Head | None:
    """Return the head of a file of weights; None if it is a cache file, or no safetensors file.

    With `refuses`, a damaged file raises a SourceError.
    """
    is_cache = os.path.realpath(path).startswith(f"{os.path.realpath('cache')}/")
    if is_cache or not (path.endswith(".safetensors") and Path(path).is_file()):
        return None
    try:
        head = read_head(path)
    except ValueError as error:
        if refuses:
            raise SourceError(str(error), where=path) from None
        return None
    return None if KEY in head.metadata else head


def _compare(facts: Facts, training: Training, explanation: WeightsExplanation) -> None:
    """Set state, reason and differences from today's project."""
    run = facts.config.runs.get(training.run)
    if run is None or run.trainer is None:
        explanation.reason = f"the configuration has no training of {training.run} today"
        return
    try:
        explanation.differences = differences_today(facts, training, explanation.items)
    except UserError as error:
        explanation.reason = f"today's plan cannot be made: {error.what}"
        return
    explanation.state, explanation.reason = "fresh", "trained; nothing differs"
    if explanation.differences:
        explanation.state = "stale"
        explanation.reason = f"{training.run} would be trained differently today"


def _of_training(explanation: WeightsExplanation, how: str) -> Iterator[tuple[str, str]]:
    """Yield lines about the training of a file: run, date, settings, items and captions."""
    training, items, metadata = explanation.training, explanation.items, explanation.metadata
    if training is not None:
        record = training.record
        yield "run", f"{training.run}, recognised {how}"
        yield "training", f"{training.folder.name} of {training.began[:19]}{_course(record)}"
        if record.ended:
            yield "training", f"did not finish: {record.ended}"
        yield from _of_record(record)
    elif run := metadata.get("latentmake.run"):
        yield "run", f"{run}, recognised by its header; the history of the run is not here"
        yield "training", metadata.get("latentmake.training", "")
    numbers = Counter(item.dataset for item in items or () if not item.validation)
    if numbers:
        words = (f"{name} {number}" for name, number in numbers.items())
        yield "items", f"{sum(numbers.values())} ({', '.join(words)})"
    elif number := metadata.get("latentmake.items"):
        yield "items", number
    texts = _texts(explanation)
    for name, own in [*texts.items()][:_SHOWN]:
        yield "caption", f"{name}: {json.dumps(own[0] if own else '', ensure_ascii=False)}"
    if len(texts) > _SHOWN:
        yield "caption", f"and {len(texts) - _SHOWN} more; `--open` shows all"


def _texts(explanation: WeightsExplanation) -> dict[str, Any]:
    """Return name -> texts of the items, from the history or from a header with captions."""
    if explanation.items is not None:
        return {item.name: item.texts for item in explanation.items}
    said = _json(explanation.metadata, "latentmake.captions").items()
    return {name: texts for name, texts in said if isinstance(texts, list)}


def _of_record(record: Record) -> Iterator[tuple[str, str]]:
    settings = record.values.get("settings", {})
    values = ((name, settings.get(name, "none")) for name in _NAMED)
    yield "settings", ", ".join(f"{name} {value}" for name, value in values if value != "none")
    places = {name: f" ({place})" for name, place in record.places.items() if place}
    parts = ((name, short(str(part))) for name, part in record.parts.items() if name != "settings")
    yield "made of", ", ".join(f"{name} {part}{places.get(name, '')}" for name, part in parts)


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


def _of_header(head: Head, explanation: WeightsExplanation) -> Iterator[tuple[str, str]]:
    """Yield lines about what the header says, in whichever program's keys."""
    metadata = explanation.metadata
    said: dict[str, list[str]] = {}
    for key, label in _ROWS.items():
        if (value := metadata.get(key, "")) not in _UNKNOWN:
            said.setdefault(label, []).append(short(value)[:_LONGEST])
    yield from ((label, ", ".join(values)) for label, values in said.items())
    if explanation.training is None:
        began = metadata.get("ss_training_started_at", "")
        with suppress(ValueError, OverflowError, OSError):
            yield "trained", f"{datetime.fromtimestamp(float(began)).astimezone():%F %T}"
        if not began and (date := metadata.get("modelspec.date")):
            yield "trained", date
        named = ((key.removeprefix("ss_"), metadata.get(key, "None")) for key in _SETTINGS)
        if words := [f"{name} {value}"[:_LONGEST] for name, value in named if value != "None"]:
            yield "settings", ", ".join(words)
    dirs = _json(metadata, "ss_dataset_dirs")
    if explanation.items is None and (words := [*_folders(dirs)]):
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
