"""`latentmake runs`: print the ledger of all trainings in the histories of runs."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import typer

from latentmake.base.errors import ConfigError, nearest
from latentmake.base.machine import human
from latentmake.commands.project import print_json, run_names, show_page, table
from latentmake.pages.trainings import write_ledger
from latentmake.plan.facts import Facts
from latentmake.runs.differences import compare, counts
from latentmake.runs.history import RosterItem, remembered, trainings

COLUMNS = (
    *("began", "run", "trigger", "items", "added", "removed", "edited", "device", "memory"),
    *("steps", "seconds", "steps_per_second", "loss_start", "loss_end", "held_out"),
    *("ended", "weights", "folder"),
)
"""Columns of the ledger. Items are counted since the training of the same run before."""
_RECORDED = {"device", "steps", "loss_start", "loss_end", "held_out", "ended"}
_RENAMED = {
    **{"began": "when", "steps_per_second": "steps/s", "loss_start": "loss before"},
    **{"loss_end": "loss after", "held_out": "held-out loss", "ended": "state"},
}
_HEADS = {name: _RENAMED.get(name, name) for name in COLUMNS if name not in ("seconds", "folder")}
"""Column -> its head in a table for people."""
_TEXTS = ("when", "run", "trigger", "device", "state", "weights")
_LONGEST = 60  # characters of a state


def runs(
    facts: Facts,
    runs: Sequence[str] | None,
    sort: str,
    as_csv: bool,
    open_page: bool,
    as_json: bool,
) -> None:
    """List all trainings of runs: when, data, device, speed, losses and weights."""
    if sort not in COLUMNS:
        guess = nearest(sort, COLUMNS)
        hint = f"did you mean `{guess}`?" if guess else f"columns: {', '.join(COLUMNS)}"
        raise ConfigError("there is no such column", where=f"--sort {sort}", hint=hint)
    names = remembered()
    run_names(facts.config, [name for name in runs or () if name not in names])
    rows = ledger(name for name in names if not runs or name in runs)
    if sort != COLUMNS[0]:
        rows.sort(key=lambda row: (row[sort] is None, row[sort]))
    if as_json:
        print_json(rows)
    elif as_csv:
        typer.echo(csv_of(rows), nl=False)
    elif rows:
        heads, lines = shown(rows)
        table(heads, lines, numbers={*heads} - {*_TEXTS})
    else:
        typer.echo("no run has been trained yet")
    if open_page:
        path = write_ledger(*shown(rows), [(row["began"], row["folder"]) for row in rows])
        show_page(path, err=as_json or as_csv)


def csv_of(rows: Iterable[Mapping[str, Any]]) -> str:
    """Return the rows of the ledger as CSV."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows({**row, "weights": " ".join(row["weights"])} for row in rows)
    return text.getvalue()


def ledger(runs: Iterable[str]) -> list[dict[str, Any]]:
    """Return the rows of the trainings of these runs, newest first.

    A value is None if it is unknown. `ended` is "" for a finished training.
    """
    rows = [row for run in runs for row in _rows(run)]
    return sorted(rows, key=lambda row: str(row["began"]), reverse=True)


def _rows(run: str) -> Iterator[dict[str, Any]]:
    before: list[RosterItem] | None = None
    for training in reversed(trainings(run)):
        items, record = training.items, training.record
        since: Mapping[str, int] = {}
        if before is not None and items is not None:
            since = counts(compare(before, items))
        speed = (record.steps or 0) / (record.seconds or 1)
        yield dict.fromkeys(COLUMNS) | {
            **training.values(),
            **{kind: since.get(kind) for kind in ("added", "removed", "edited")},
            **record.model_dump(include=_RECORDED),
            "trigger": record.values.get("settings", {}).get("trigger", ""),
            "items": None if items is None else len(items),
            "memory": round(record.memory) or None,
            "seconds": record.seconds or None,
            "steps_per_second": round(speed, 3) or None,
            "weights": [] if record.ended else training.weights,
        }
        before = items


def shown(rows: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Return heads and rows of the ledger as texts, without columns that have no value."""
    texts = [dict(_texts(row)) for row in rows]
    heads = [head for head in _HEADS.values() if any(text[head] for text in texts)]
    return heads, [[text[head] for head in heads] for text in texts]


def _texts(row: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for column, head in _HEADS.items():
        value = row[column]
        match column:
            case "began":
                text = value[:16]
            case "memory":
                text = "" if value is None else human(value)
            case "ended":
                text = f"{value[:_LONGEST]}..." if value[_LONGEST:] else value or "finished"
            case "weights":
                text = value[0] if value else "" if row["ended"] else "gone"
            case _:
                text = f"{value:.4g}" if isinstance(value, float) else str(value or "")
                text = "0" if value == 0 else text
        yield head, text
