"""`latentmake check`: a checklist of all that a run needs."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator

import typer

from latentmake import backends
from latentmake.files.workspace import free, human, shortages
from latentmake.plan import receipts
from latentmake.plan.facts import Facts
from latentmake.plan.run_plan import RunPlan
from latentmake.plan.state import PartState
from latentmake.plan.target import Part
from latentmake.training.backend import Finding, checklist, failed, image_findings, of_faults
from latentmake.words.project import ConfigFiles, Directory, Json, Runs, opened


def check(
    runs: Runs = None,
    as_json: Json = False,
    configfile: ConfigFiles = None,
    directory: Directory = None,
) -> None:
    """Check all that a run needs: caches, items, disk, models, the trainer and its settings."""
    with opened(configfile, directory) as project:
        names = project.run_names(runs)
        plan = project.plan(names)
        found = {name: [*_findings(project.facts, plan.runs[name])] for name in names}
    if as_json:
        values = {name: [each._asdict() for each in found[name]] for name in names}
        typer.echo(json.dumps(values, indent=1))
    for name in () if as_json else names:
        typer.echo(f"{name}:\n" * (len(names) > 1) + checklist(found[name]))
    if any(map(failed, found.values())):
        raise typer.Exit(1)


def _findings(facts: Facts, plan: RunPlan) -> Iterator[Finding]:
    """Yield the checklist of a run."""
    run, datasets = facts.config.runs[plan.name], facts.config.datasets
    for part, state in sorted(plan.parts.items()):
        yield _of_part(part, state)
    yield from _estimated(facts, plan)
    faults = [
        fault.line
        for name, found in plan.faults.items()
        if name not in run.datasets or datasets[name].on_error != "skip"
        for fault in found
    ]
    yield of_faults("items", faults, "none is faulty, as far as is known")
    current = plan.manifest_order is None
    if not current:
        note = "is not up to date: the next build writes it, and its files are checked then"
        yield Finding("manifest", "warning", note)
    backend = backends.of_run(facts.config, plan.name)
    if backend is not None and plan.trainer is not None:
        yield from backend.check(plan.trainer, current=current)
    if not current and facts.layout(run.model).external:
        items = (item for name in run.datasets for item in facts.items(name, run.model)[0])
        yield from image_findings(
            path for item in items for path in (item.image, *item.controls, *item.layers)
        )


def _estimated(facts: Facts, plan: RunPlan) -> Iterator[Finding]:
    """Yield estimates of what is to be encoded and trained, and whether the disk has room."""
    needs = receipts.needs(facts.memo, plan.orders)
    for line in receipts.lines(facts.memo, plan.orders):
        yield Finding("to encode", "ok", line)
    needs += plan.needs
    if plan.forecast:
        yield Finding("training", "ok", plan.forecast)
    if not needs:
        return
    errors = [Finding("disk", "failed", str(error)) for error in shortages(needs)]
    note = f"{human(free('cache'))} free; {human(sum(need.size for need in needs))} are needed"
    yield from errors or [Finding("disk", "ok", note)]


def _of_part(part: Part, state: PartState) -> Finding:
    stale = Counter(each.reason for each in state.stale)
    missing = stale.pop("new", 0)
    reasons = f" ({', '.join(f'{n} {reason}' for reason, n in stale.items())})" if stale else ""
    note = f"{state.fresh} fresh, {stale.total()} stale{reasons}, {missing} missing"
    if state.orphans:
        note += f", {len(state.orphans)} of items that are gone"
    doubtful = state.stale or state.orphans
    return Finding(f"caches: {'/'.join(part)}", "warning" if doubtful else "ok", note)
