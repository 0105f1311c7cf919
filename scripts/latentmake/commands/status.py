"""`latentmake status`: show the state of runs."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import typer

from latentmake.base.machine import counted, duration, human
from latentmake.commands.project import coloured, present_plan, print_json, run_names, table
from latentmake.pages.overview import Status, StatusRow, status_of
from latentmake.plan.facts import Facts
from latentmake.plan.judge import REASONS


def status(facts: Facts, runs: Sequence[str] | None, verbose: bool, as_json: bool) -> None:
    """Count fresh and stale caches of runs, and what is left to encode and train."""
    names = run_names(facts.config, runs)
    plan = present_plan(facts, names)
    results = [status_of(facts, plan.runs[name]) for name in names]
    if as_json:
        print_json([result.model_dump(mode="json") for result in results])
        return
    builds = (line for result in results for build in result.builds for line in _progress(build))
    for line in dict.fromkeys(builds):
        typer.echo(line)
    for result in results:
        _show(result, verbose=verbose)


def _progress(build: Mapping[str, Any]) -> Iterator[str]:
    targets = " ".join(build["targets"]) or "all"
    since = duration(max(0.0, time.time() - build["began"]) / 60)
    yield f"a build runs: {targets} (process {build['process']}), for {since}"
    for work, (made, total) in build["made"].items():
        yield f"  {' of '.join(work.split(' ', 1))}: {made} of {total} targets made"
    for run, line in build["training"].items():
        yield f"  training of {run}: {line or 'not begun'}"


def _show(result: Status, *, verbose: bool) -> None:
    reasons = [reason for reason in REASONS if any(reason in row.stale for row in result.rows)]
    headers = ["dataset", "model", "kind", "fresh", *reasons, "orphaned", "bytes", "to encode"]
    table(headers, (_cells(row, reasons) for row in result.rows), numbers=headers[3:-1])
    lines = [f"{coloured('faulty')}{'':10}{line}" for line in result.faulty]
    if verbose:
        lines = [f"{file['reason']:15} {file['path']}" for file in result.files] + lines
    elif count := len(result.files):
        lines.insert(0, f"{counted(count, 'file', 'are')} not fresh; --verbose lists them")
    fresh = sum(row.fresh for row in result.rows)
    lines += [f"{result.run}: {fresh} targets fresh, {result.stale} stale", *result.lines]
    typer.echo("\n".join(lines))


def _cells(row: StatusRow, reasons: list[str]) -> list[str]:
    counts = [row.fresh, *(row.stale.get(reason, 0) for reason in reasons), row.orphans]
    numbers = [str(count) if count else "." for count in counts]
    size = "size unknown" if row.rest_bytes is None else f"about {human(row.rest_bytes)}"
    time = "time unknown" if row.rest_seconds is None else duration(row.rest_seconds / 60)
    rest = f"{row.rest}, {size}, {time}" if row.rest else ""
    total = human(row.bytes) if row.bytes else "."
    return [row.dataset, row.model, row.kind, *numbers, total, rest]
