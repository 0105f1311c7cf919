"""Ledger of trainings: one row for each training in the histories of runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from latentmake.runs.differences import compare
from latentmake.runs.history import RosterItem, items_of, trainings, weights_of
from latentmake.runs.order import RECORD, Record

COLUMNS = (
    *("began", "run", "trigger", "items", "added", "removed", "edited", "device", "memory"),
    *("steps", "seconds", "steps_per_second", "loss_start", "loss_end", "held_out"),
    *("ended", "weights", "folder"),
)
"""Columns of the ledger. Items are counted since the training of the same run before."""


def ledger(runs: Iterable[str]) -> list[dict[str, Any]]:
    """Return the rows of the trainings of these runs, newest first.

    A value is None if it is unknown. `ended` is "" for a finished training.
    """
    rows = [row for run in runs for row in _rows(run)]
    return sorted(rows, key=lambda row: str(row["began"]), reverse=True)


def _rows(run: str) -> Iterator[dict[str, Any]]:
    before: list[RosterItem] | None = None
    for folder, record in reversed(trainings(run)):
        items = items_of(folder)
        yield dict.fromkeys(COLUMNS) | {
            "began": began(folder, record),
            "run": run,
            "trigger": record.values.get("settings", {}).get("trigger", ""),
            **_counts(before, items),
            "device": record.device,
            "memory": round(record.memory) or None,
            "steps": record.steps,
            "seconds": record.seconds or None,
            "steps_per_second": _speed(record),
            "loss_start": record.loss_start,
            "loss_end": record.loss_end,
            "held_out": record.held_out,
            "ended": record.ended,
            "weights": [] if record.ended else [*map(str, weights_of(run, record))],
            "folder": str(folder),
        }
        before = items


def began(folder: Path, record: Record) -> str:
    """Return when a training began, in ISO format; when it ended, if only that is known."""
    time = record.began or (folder / RECORD).stat().st_mtime
    return datetime.fromtimestamp(time).astimezone().isoformat(" ", "seconds")


def _counts(
    before: list[RosterItem] | None, items: list[RosterItem] | None
) -> dict[str, int | None]:
    """Return number of items, and how many were added, removed and edited."""
    if items is None:
        return {}
    if before is None:
        return {"items": len(items)}
    changes = compare(before, items)
    edited = {*changes.replaced, *(place for place, _, _ in changes.captions)}
    counts = {"added": len(changes.added), "removed": len(changes.removed), "edited": len(edited)}
    return {"items": len(items), **counts}


def _speed(record: Record) -> float | None:
    if not record.steps or not record.seconds:
        return None
    return round(record.steps / record.seconds, 3)
