"""`latentmake status`: the state of caches and of running builds."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import typer

from latentmake.files.workspace import human
from latentmake.plan.state import REASONS
from latentmake.progress import duration
from latentmake.reports.status import Status, StatusRow, status_of
from latentmake.words.project import ConfigFiles, Directory, Json, Runs, opened, table


def status(
    runs: Runs = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="List each file that is not up to date.")
    ] = False,
    as_json: Json = False,
    configfile: ConfigFiles = None,
    directory: Directory = None,
) -> None:
    """Count fresh and stale caches of runs, and what is left to encode and train."""
    with opened(configfile, directory) as project:
        names = project.run_names(runs)
        plan = project.plan(names)
        found = [status_of(project.facts, plan.runs[name]) for name in names]
    if as_json:
        typer.echo(json.dumps([each.model_dump(mode="json") for each in found], indent=1))
        return
    for line in dict.fromkeys(
        line for each in found for build in each.builds for line in _progress(build)
    ):
        typer.echo(line)
    for each in found:
        _show(each, verbose=verbose)


def _progress(build: Mapping[str, Any]) -> Iterator[str]:
    """Yield a running build in words."""
    asked = " ".join(build["targets"]) or "all"
    since = duration(max(0.0, time.time() - build["began"]) / 60)
    yield f"a build runs: {asked} (process {build['process']}), for {since}"
    for work, (made, total) in build["made"].items():
        yield f"  {' of '.join(work.split(' ', 1))}: {made} of {total} targets made"
    for run, line in build["training"].items():
        yield f"  training of {run}: {line or 'not begun'}"


def _show(found: Status, *, verbose: bool) -> None:
    reasons = [reason for reason in REASONS if any(reason in row.stale for row in found.rows)]
    headers = ["dataset", "model", "kind", "fresh", *reasons, "orphaned", "bytes", "to encode"]
    table(headers, (_cells(row, reasons) for row in found.rows), numbers=headers[3:-1])
    for line in _lines(found, verbose=verbose):
        typer.echo(line)


def _lines(found: Status, *, verbose: bool) -> Iterator[str]:
    if verbose:
        for file in found.files:
            yield f"{file['reason']:15} {file['path']}"
    elif found.files:
        count = len(found.files)
        yield f"{count} {'file is' if count == 1 else 'files are'} not fresh; --verbose lists them"
    for line in found.faulty:
        yield f"{'faulty':15} {line}"
    yield f"{found.run}: {found.fresh} targets fresh, {found.stale} stale"
    yield from found.lines


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
