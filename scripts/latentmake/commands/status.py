"""`latentmake status` and `latentmake check`: show the state of runs, and check their needs."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import typer

from latentmake import backends
from latentmake.base.workspace import duration, free, human, shortages
from latentmake.commands.project import coloured, opened, table
from latentmake.pages.plan_report import counted, stopped_by
from latentmake.pages.status import Status, StatusRow, status_of
from latentmake.plan import receipts
from latentmake.plan.facts import Facts
from latentmake.plan.orders import Part
from latentmake.plan.run_plan import RunPlan, faulty_items
from latentmake.plan.state import REASONS, PartState
from latentmake.training.findings import Finding, Verdict, checklist, failed, image_findings


def status(
    runs: Sequence[str] | None = None,
    verbose: bool = False,
    as_json: bool = False,
    configfile: Sequence[Path] | None = None,
    directory: Path | None = None,
) -> None:
    """Count fresh and stale caches of runs, and what is left to encode and train."""
    with opened(configfile, directory) as project:
        names = project.run_names(runs)
        plan = project.plan(names)
        untrained = [name for name in names if project.config.runs[name].trainer is None]
        plan.leave_out_prompts(untrained)
        results = [status_of(project.facts, plan.runs[name]) for name in names]
    if as_json:
        typer.echo(json.dumps([result.model_dump(mode="json") for result in results], indent=1))
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
        are = "file is" if count == 1 else "files are"
        lines.insert(0, f"{count} {are} not fresh; --verbose lists them")
    fresh = sum(row.fresh for row in result.rows)
    lines += [f"{result.run}: {fresh} targets fresh, {result.stale} stale", *result.lines]
    typer.echo("\n".join(lines))


def _cells(row: StatusRow, reasons: list[str]) -> list[str]:
    counts = [row.fresh, *(row.stale.get(reason, 0) for reason in reasons), row.orphans]
    numbers = [str(count) if count else "." for count in counts]
    size = "size unknown" if row.rest_bytes is None else f"about {human(row.rest_bytes)}"
    time = "time unknown" if row.rest_seconds is None else duration(row.rest_seconds / 60)
    rest = f"{row.rest}, {size}, {time}" if row.rest else ""
    return [
        row.dataset,
        row.model,
        row.kind,
        *numbers,
        human(row.bytes) if row.bytes else ".",
        rest,
    ]


def check(
    runs: Sequence[str] | None = None,
    as_json: bool = False,
    configfile: Sequence[Path] | None = None,
    directory: Path | None = None,
) -> None:
    """Check all that a run needs: caches, items, disk, models, the trainer and its settings."""
    with opened(configfile, directory) as project:
        names = project.run_names(runs)
        plan = project.plan(names)
        findings = {name: [*_findings(project.facts, plan.runs[name])] for name in names}
    if as_json:
        values = {name: [finding._asdict() for finding in findings[name]] for name in names}
        typer.echo(json.dumps(values, indent=1))
    for name in () if as_json else names:
        if len(names) > 1:
            typer.echo(f"{name}:")
        typer.echo(checklist(findings[name], coloured))
        if failed(findings[name]):
            typer.echo(_stopped(project.facts, plan.runs[name], findings[name]))
    if any(map(failed, findings.values())):
        raise typer.Exit(1)


def _findings(facts: Facts, plan: RunPlan) -> Iterator[Finding]:
    run = facts.config.runs[plan.name]
    for part, state in sorted(plan.parts.items()):
        yield _of_part(part, state)
    yield from (Finding("caches", "warning", line) for line in plan.warnings)
    for line in receipts.lines(facts.memo, plan.orders):
        yield Finding("to encode", "ok", line)
    if plan.forecast:
        yield Finding("training", "ok", plan.forecast)
    if needs := [*receipts.needs(facts.memo, plan.orders), *plan.needs]:
        errors = [Finding("disk", "failed", str(error)) for error in shortages(needs)]
        note = f"{human(free('cache'))} free; {human(sum(need.size for need in needs))} are needed"
        yield from errors or [Finding("disk", "ok", note)]
    yield from _of_items(facts, plan)
    current = plan.manifest_order is None
    if not current:
        note = "is not up to date: the next build writes it, and its files are checked then"
        yield Finding("manifest", "warning", note)
    backend = backends.of_run(facts.config, plan.name)
    if backend is not None and plan.trainer is not None:
        yield from backend.check(plan.trainer, current=current)
    if not current and facts.layout(run.model).external:
        images, alpha = list[str](), set[str]()
        for name in run.datasets:
            for item in facts.items(name, run.model)[0]:
                images += [item.image, *item.controls, *item.layers]
                if item.layers or facts.config.datasets[name].alpha_mask:
                    alpha |= {item.image, *item.layers}
        yield from image_findings(images, alpha)


def _stopped(facts: Facts, plan: RunPlan, findings: Sequence[Finding]) -> str:
    """Return the line that says why a run will not be trained."""
    count = sum(finding.verdict == "failed" and finding.what != "items" for finding in findings)
    others = f"{count} more checks" if count > 1 else "1 more check"
    if line := stopped_by(facts, plan):
        return f"{line}; {others} failed" if count else line
    return f"the training of {plan.name} will not start: {counted(count, 'check')} failed"


def _of_items(facts: Facts, plan: RunPlan) -> Iterator[Finding]:
    findings: list[Finding] = []
    for name, lines in faulty_items(facts, plan).items():
        skips = facts.config.datasets[name].on_error == "skip"
        verdict: Verdict = "warning" if skips else "failed"
        what = "skipped: " if skips else ""
        findings += [Finding("items", verdict, f"{what}{line}") for line in lines]
    yield from findings or [Finding("items", "ok", "none is faulty, as far as is known")]


def _of_part(part: Part, state: PartState) -> Finding:
    stale = Counter(target.reason for target in state.stale)
    missing = stale.pop("new", 0)
    reasons = f" ({', '.join(f'{n} {reason}' for reason, n in stale.items())})" if stale else ""
    note = f"{state.fresh} fresh, {stale.total()} stale{reasons}, {missing} missing"
    if state.orphans:
        note += f", {len(state.orphans)} of items that are gone"
    doubtful = state.stale or state.orphans
    return Finding(f"caches: {'/'.join(part)}", "warning" if doubtful else "ok", note)
