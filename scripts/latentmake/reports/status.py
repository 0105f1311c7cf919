"""Status of a run in words, and as JSON for other programs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from tabulate import tabulate

from latentmake.files import atomic
from latentmake.files.disk import human
from latentmake.plan.staleness import REASONS
from latentmake.plan.training_estimate import duration
from latentmake.reports.status_order import StatusOrder, StatusRow

__all__ = ["status_text", "write_status"]


def status_text(order: StatusOrder) -> str:
    """Return what `status_{run}` prints."""
    return "".join(f"{line}\n" for line in _lines(order))


def write_status(order: StatusOrder, path: Path) -> None:
    """Write a status as JSON, with each file that is not fresh."""
    values = order.model_dump(mode="json", exclude={"verbose", "files"})
    files = [{"reason": reason, "path": path} for reason, path in order.files]
    atomic.write(path, json.dumps(values | {"files": files}, indent=1).encode() + b"\n")


def _lines(order: StatusOrder) -> Iterator[str]:
    for build in order.builds:
        yield from build.lines()
    reasons = [reason for reason in REASONS if any(reason in row.stale for row in order.rows)]
    rows = [_cells(row, reasons) for row in order.rows]
    headers = ["dataset", "model", "kind", "fresh", *reasons, "orphaned", "bytes", "to encode"]
    align = ["left"] * 3 + ["right"] * (len(reasons) + 3) + ["left"]
    yield tabulate(rows, headers=headers, disable_numparse=True, colalign=align)
    if order.verbose:
        for reason, path in order.files:
            yield f"{reason:15} {path}"
    elif order.files:
        yield f"{len(order.files)} files are not fresh; --config verbose=true lists them"
    for line in order.faulty:
        yield f"{'faulty':15} {line}"
    yield f"{order.run}: {order.fresh} targets fresh, {order.stale} stale"
    yield from order.lines


def _cells(row: StatusRow, reasons: list[str]) -> list[str]:
    counts = [row.fresh, *(row.stale.get(reason, 0) for reason in reasons), row.orphans]
    numbers = [str(count) if count else "." for count in counts]
    size = human(row.bytes) if row.bytes else "."
    return [row.dataset, row.model, row.kind, *numbers, size, _rest(row)]


def _rest(row: StatusRow) -> str:
    if not row.rest:
        return ""
    size = "size unknown" if row.rest_bytes is None else f"about {human(row.rest_bytes)}"
    time = "time unknown" if row.rest_seconds is None else duration(row.rest_seconds / 60)
    return f"{row.rest}, {size}, {time}"
