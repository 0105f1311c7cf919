"""`latentmake diff`: print what differs between two trainings, or since the last training of a run.

A training is named as `named_trainings` says. Without a second training, today's data and settings
are compared with the first one: the next training learns these differences anew.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any

import typer

from latentmake.base.errors import ConfigError, SourceError, escaped
from latentmake.base.machine import human
from latentmake.commands.named_trainings import Training, is_present, training_of
from latentmake.commands.project import plan_of, printable
from latentmake.data.contents import Contents
from latentmake.pages.trainings import write_diff
from latentmake.plan.facts import Facts
from latentmake.plan.product import Difference, judge
from latentmake.runs.differences import MEMORY, Changes, compare, figures, settings, words
from latentmake.runs.history import RosterItem, items_of
from latentmake.runs.order import RunOrder

_SHOWN = 20  # most items of one kind that are printed
_KEPT = 25  # characters that are printed on either side of an edit
_STYLES = {"-": ("[-{}-]", "red"), "+": ("{{+{}+}}", "green")}


def diff(facts: Facts, old: str, new: str | None, open_page: bool, as_json: bool) -> None:
    """Show what differs between two trainings, or since the last training of a run."""
    first = training_of(facts.config, old)
    if new is None:
        content, changes = _since(facts, first)
    else:
        content, changes = _between(first, training_of(facts.config, new))
    content["items"] = changes and item_values(changes)
    if as_json:
        typer.echo(json.dumps(content, indent=1))
    else:
        for line in _lines(content, changes):
            typer.echo(printable(line))
    if open_page:
        names = (content["old"]["name"], content["new"]["name"])
        path = write_diff(names, content, changes, first.folder)
        typer.echo(path, err=as_json)
        typer.launch(path.absolute().as_uri())


def _between(old: Training, new: Training) -> tuple[dict[str, Any], Changes | None]:
    before, after = items_of(old.folder), items_of(new.folder)
    changes = None if before is None or after is None else compare(before, after)
    differences = settings(old.record, new.record, changes)
    content = {
        "old": old.values(),
        "new": new.values(),
        "settings": [difference._asdict() for difference in differences],
        "figures": {name: [was, now] for name, was, now in figures(old.record, new.record)},
    }
    return content, changes


def _since(facts: Facts, last: Training) -> tuple[dict[str, Any], Changes | None]:
    """Return the differences of today's data and settings from a training of a run."""
    run = last.run
    if run not in facts.config.runs:
        hint = "name a second training"
        raise ConfigError("the configuration has no such run", where=run, hint=hint)
    before = items_of(last.folder)
    changes = None if before is None else compare(before, todays_items(facts, run, before))
    content = {
        "old": last.values(),
        "new": {"name": "today", "run": run},
        "settings": [difference._asdict() for difference in _todays_settings(facts, last)],
        "figures": {},
    }
    return content, changes


def _todays_settings(facts: Facts, last: Training) -> list[Difference]:
    """Return differences of today's settings and network from those of a training.

    If it is the training of the run's result, these are the reasons to train, without items.
    """
    plan, record = plan_of(facts, [last.run]).runs[last.run], last.record
    if is_present(last):
        return [reason for reason in plan.reasons if not reason.name.startswith("items of ")]
    if not isinstance(plan.trainer, RunOrder):
        return []
    today = plan.trainer.product_since(record, record.dataset)
    named = {name: today.parts.get(name) for name in ("settings", "network")}
    parts = record.parts | {name: part for name, part in named.items() if part}
    return judge(today._replace(parts=parts, files=()), record)


def todays_items(facts: Facts, run: str, seen: Sequence[RosterItem]) -> Iterator[RosterItem]:
    """Yield today's items of a run, as a roster would have them.

    Values that only a build finds out, and contents that cannot be read, are those of `seen`.
    """
    settings = facts.config.runs[run]
    layout = facts.layout(settings.model)
    by_place = {(item.dataset, item.stem): item for item in seen}
    by_source = {item.source: item for item in seen if item.source}
    for name in settings.datasets:
        items, dataset = facts.wanted_items(name, settings.model), facts.config.datasets[name]
        contents = Contents((file for item in items for file in item.files), facts.memo, dataset)
        for item in items:
            own: dict[str, Any] = {"dataset": name, "stem": item.stem, "is_reg": dataset.is_reg}
            if not item.is_remote and (source := contents.of(item.inputs("latents", layout))):
                own["source"] = source
            if not dataset.is_reg:  # repeats of others are balanced when the manifest is written
                own["repeats"] = dataset.num_repeats
            try:
                own["texts"] = item.texts or [contents.text(item)]
            except SourceError as error:
                typer.echo(f"note: {error}", err=True)
            was = by_place.get((name, item.stem)) or by_source.get(own.get("source", ""))
            yield was.model_copy(update=own) if was else RosterItem(**own)


# -- values and lines -----------------------------------------------------------------------------


def item_values(changes: Changes) -> dict[str, Any]:
    """Return the changes of items as JSON values."""
    return {
        **{
            kind: ["/".join(place) for place in getattr(changes, kind)]
            for kind in ("added", "removed", "replaced")
        },
        "renamed": [{"old": "/".join(old), "new": "/".join(new)} for old, new in changes.renamed],
        "captions": [
            {"item": "/".join(place), "old": old, "new": new}
            for place, old, new in changes.captions
        ],
        "others": [
            {"dataset": dataset, **difference._asdict(), "items": number}
            for (dataset, difference), number in changes.others.items()
        ],
    }


def _lines(content: dict[str, Any], changes: Changes | None) -> Iterator[str]:
    yield " -> ".join(map(_titled, (content["old"], content["new"])))
    rows: list[Iterator[tuple[str, str]]] = []
    if changes is None:
        yield "items     unknown: no roster of an earlier training is left"
    else:
        yield f"items     {changes.summary or 'the same pictures and captions'}"
        rows = [*_item_rows(changes)]
    rows.append(("setting", str(Difference(**values))) for values in content["settings"])
    rows.append(("result", _figure(name, *pair)) for name, pair in content["figures"].items())
    yield from (f"{label:<10}{text}" for label, text in chain(*rows))


def _titled(training: Mapping[str, Any]) -> str:
    began = training.get("began", "")
    return f"{training['name']} ({began[:16]})" if began else training["name"]


def _item_rows(changes: Changes) -> Iterator[Iterator[tuple[str, str]]]:
    """Yield the label and the text of the first items of each kind."""
    for kind in ("added", "removed", "replaced"):
        yield _some(kind, ["/".join(place) for place in getattr(changes, kind)])
    yield _some("renamed", [f"{'/'.join(old)} -> {'/'.join(new)}" for old, new in changes.renamed])
    edits = [*changes.edits()]
    captions = (f"{'/'.join(place)}: {edited(was, now)}" for place, was, now in edits)
    yield _some("caption", captions, len(edits))
    others = [f"{what}: {number} of {name}" for (name, what), number in changes.others.items()]
    yield _some("items", others)


def _some(
    label: str, texts: Sequence[str] | Iterator[str], number: int = 0
) -> Iterator[tuple[str, str]]:
    number = number or (len(texts) if isinstance(texts, Sequence) else 0)
    yield from ((label, text) for text in islice(texts, _SHOWN))
    if number > _SHOWN:
        yield label, f"and {number - _SHOWN} more; --json lists all"


def edited(before: str, after: str) -> str:
    """Return an edited caption in one line: `a [-red-]{+blue+} cat`, in colour in a terminal."""
    parts = words(before, after)
    line = ""
    for number, (mark, text) in enumerate(parts):
        shown = escaped(" ".join(f"|{text}|".split())[1:-1])  # keeps one space at either end
        if not mark:
            line += _shortened(shown, start=number > 0, end=number < len(parts) - 1)
            continue
        inner = shown.strip() or shown
        form, colour = _STYLES[mark]
        marked = form.format(inner)
        if not os.environ.get("NO_COLOR"):
            marked = typer.style(marked, fg=colour)
        line += shown.replace(inner, marked) if inner != shown else marked
    return line


def _shortened(text: str, *, start: bool, end: bool) -> str:
    """Return unchanged words, with `...` in place of those that are far from an edit."""
    head, tail = text[:_KEPT] if start else "", text[-_KEPT:] if end else ""
    return f"{head}...{tail}" if len(text) > len(head) + len(tail) + 3 else text


def _figure(name: str, old: float | None, new: float | None) -> str:
    shown = human if name == MEMORY else "{:.4g}".format
    texts = ["unknown" if value is None else shown(value) for value in (old, new)]
    return f"{name} {' -> '.join(dict.fromkeys(texts))}"
