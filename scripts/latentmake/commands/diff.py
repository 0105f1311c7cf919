"""`latentmake diff`: print what differs between two trainings, or since the last training of a run.

A training is named as `named_trainings` says. Without a second training, today's data and settings
are compared with the first one: the next training learns these differences anew.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import typer

from latentmake.base.errors import ConfigError, escaped
from latentmake.base.machine import human
from latentmake.commands.named_trainings import differences_today, training_of
from latentmake.commands.project import print_json, printable, show_page
from latentmake.pages.trainings import write_diff
from latentmake.plan.facts import Facts
from latentmake.plan.product import Difference
from latentmake.runs.differences import (
    MEMORY,
    Change,
    compare,
    figures,
    rows,
    settings,
    summary,
    words,
)
from latentmake.runs.edited import COUNTED, todays_items
from latentmake.runs.history import Training

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
    content["items"] = None if changes is None else [change._asdict() for change in changes]
    if as_json:
        print_json(content)
    else:
        typer.echo(" -> ".join(map(_titled, (content["old"], content["new"]))))
        for label, text in _rows(content, changes):
            typer.echo(printable(f"{label:10}{text}"))
    if open_page:
        names = (content["old"]["name"], content["new"]["name"])
        show_page(write_diff(names, content, changes, first.folder), err=as_json)


def _between(old: Training, new: Training) -> tuple[dict[str, Any], list[Change] | None]:
    before, after = old.items, new.items
    changes = None if before is None or after is None else compare(before, after)
    content = {
        "old": old.values(),
        "new": new.values(),
        "settings": [own._asdict() for own in settings(old.record, new.record, changes)],
        "figures": {name: [was, now] for name, was, now in figures(old.record, new.record)},
    }
    return content, changes


def _since(facts: Facts, last: Training) -> tuple[dict[str, Any], list[Change] | None]:
    """Return the differences of today's data and settings from a training of a run."""
    run, before, changes = last.run, last.items, None
    if run not in facts.config.runs:
        hint = "name a second training"
        raise ConfigError("the configuration has no such run", where=run, hint=hint)
    if before is not None:
        say = partial(typer.echo, err=True)
        today = todays_items(facts, run, before, say=lambda fault: say(f"note: {fault}"))
        changes = compare(before, today)
    differences = differences_today(facts, last, before)
    content = {
        "old": last.values(),
        "new": {"name": "today", "run": run},
        "settings": [own._asdict() for own in differences if not own.name.startswith(COUNTED)],
        "figures": {},
    }
    return content, changes


# -- lines ----------------------------------------------------------------------------------------


def _titled(training: Mapping[str, Any]) -> str:
    began = training.get("began", "")
    return f"{training['name']} ({began[:16]})" if began else training["name"]


def _rows(content: Mapping[str, Any], changes: list[Change] | None) -> Iterator[tuple[str, str]]:
    """Yield the labels and texts of lines."""
    if changes is None:
        yield "items", "unknown: no roster of an earlier training is left"
    else:
        yield "items", summary(changes) or "the same pictures and captions"
        for kind, item, before, after in rows(changes, _SHOWN):
            yield kind, f"{item}: {edited(before, after)}" if before or after else item
    for values in content["settings"]:
        yield "setting", str(Difference(**values))
    for name, values in content["figures"].items():
        yield "result", _figure(name, *values)


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
