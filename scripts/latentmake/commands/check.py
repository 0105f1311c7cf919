"""`latentmake check`: look for what would stop a training, and build nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import typer

from latentmake import backends
from latentmake.base.machine import counted, free, human, shortages
from latentmake.commands.project import coloured, plan_of, print_json, run_names
from latentmake.pages.plan_report import (
    by_work,
    disk_needs,
    estimate_lines,
    stopped_by,
    to_make,
)
from latentmake.plan.facts import Facts
from latentmake.plan.judge import PartState
from latentmake.plan.orders import Part
from latentmake.plan.run_plan import RunPlan, faulty_items
from latentmake.runs.findings import Finding, Verdict, checklist, failed, image_findings


def check(facts: Facts, runs: Sequence[str] | None, as_json: bool) -> None:
    """Check all that a run needs: caches, items, disk, models, the trainer and its settings."""
    names = run_names(facts.config, runs)
    plan = plan_of(facts, names)
    findings = {name: [*_findings(facts, plan.runs[name])] for name in names}
    if as_json:
        values = {name: [finding._asdict() for finding in findings[name]] for name in names}
        print_json(values)
    for name in () if as_json else names:
        if len(names) > 1:
            typer.echo(f"{name}:")
        typer.echo(checklist(findings[name], coloured))
        if failed(findings[name]):
            typer.echo(_stopped(facts, plan.runs[name], findings[name]))
    if any(map(failed, findings.values())):
        raise typer.Exit(1)


def _findings(facts: Facts, plan: RunPlan) -> Iterator[Finding]:
    run = facts.config.runs[plan.name]
    for part, state in sorted(plan.parts.items()):
        yield _of_part(part, state)
    yield from (Finding("caches", "warning", line) for line in plan.warnings)
    sums = by_work(facts, to_make(plan.parts))
    for line in estimate_lines(facts, sums):
        yield Finding("to encode", "ok", line)
    if plan.forecast:
        yield Finding("training", "ok", plan.forecast)
    if needs := [*disk_needs(sums), *plan.needs]:
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
    if line := stopped_by(facts, plan):
        return f"{line}; {counted(count, 'more check')} failed" if count else line
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
    stale = Counter(state.reasons)
    missing = stale.pop("new", 0)
    reasons = f" ({', '.join(f'{n} {reason}' for reason, n in stale.items())})" if stale else ""
    note = f"{state.fresh} fresh, {stale.total()} stale{reasons}, {missing} missing"
    if state.orphans:
        note += f", {len(state.orphans)} of items that are gone"
    doubtful = state.stale or state.orphans
    return Finding(f"caches: {'/'.join(part)}", "warning" if doubtful else "ok", note)
