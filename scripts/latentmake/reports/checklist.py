"""Order of `check_{run}`: the checklist of caches, items and manifest, and the trainer's order.

The job adds the trainer's own findings. Nothing is encoded.
"""

from __future__ import annotations

from collections import Counter

from pydantic import BaseModel

from latentmake.config import Run
from latentmake.files.disk import free, human, shortages
from latentmake.plan.estimates import Estimates
from latentmake.plan.facts import Facts
from latentmake.plan.jobs import jobs_of
from latentmake.plan.parts import Part, RunPlan
from latentmake.plan.staleness import PartState
from latentmake.training.checks import Finding, of_faults

__all__ = ["CheckOrder", "plan_check"]


class CheckOrder(BaseModel, extra="forbid", frozen=True):
    """A run's checklist as far as it is planned.

    Attributes:
        findings: on caches, items and manifest.
        current: whether the manifest is up to date, so that its files can be checked.
        trainer: path of its trainer's order; None without a trainer.
        images: to look at where the manifest is not up to date, and the layout follows musubi-tuner
            or sd-scripts.
    """

    findings: list[Finding]
    current: bool
    trainer: str | None
    images: list[str] = []


def plan_check(facts: Facts, plan: RunPlan, run: Run) -> CheckOrder:
    """Return the order of a run's checklist."""
    datasets = facts.config.datasets
    faults = [
        fault.line
        for name, found in plan.faults.items()
        if name not in run.datasets or datasets[name].on_error != "skip"
        for fault in found
    ]
    findings = [_of_part(part, state) for part, state in sorted(plan.parts.items())]
    findings += _estimated(facts, plan)
    findings.append(of_faults("items", faults, "none is faulty, as far as is known"))
    current = plan.manifest_order is None
    if not current:
        note = "is not up to date: the next build writes it, and its files are checked then"
        findings.append(Finding("manifest", "warning", note))
    trainer = None if plan.trainer_order is None else str(plan.trainer_order)
    images = [
        path
        for dataset in run.datasets
        if not current and facts.layout(run.model).adopts
        for item in facts.items(dataset, run.model)[0]
        for path in (item.image, *item.controls, *item.layers)
    ]
    return CheckOrder(findings=findings, current=current, trainer=trainer, images=images)


def _estimated(facts: Facts, plan: RunPlan) -> list[Finding]:
    """Return estimates of what is to be encoded and trained, and whether the disk has room."""
    estimates = Estimates(facts.memo, jobs_of(((order, ()) for order in plan.orders), 1))
    needs = estimates.needs(plan.orders)
    found = [Finding("to encode", "ok", line) for line in estimates.lines()]
    if plan.estimate is not None:
        needs.append(plan.estimate.need)
        found.append(Finding("training", "ok", plan.estimate.note))
    if not needs:
        return found
    errors = [Finding("disk", "failed", str(error)) for error in shortages(needs)]
    note = f"{human(free('cache'))} free; {human(sum(need.size for need in needs))} are needed"
    return [*found, *(errors or [Finding("disk", "ok", note)])]


def _of_part(part: Part, state: PartState) -> Finding:
    stale = Counter(each.reason for each in state.stale)
    missing = stale.pop("new", 0)
    reasons = f" ({', '.join(f'{n} {reason}' for reason, n in stale.items())})" if stale else ""
    note = f"{state.fresh} fresh, {stale.total()} stale{reasons}, {missing} missing"
    if state.orphans:
        note += f", {len(state.orphans)} of items that are gone"
    doubtful = state.stale or state.orphans
    return Finding(f"caches: {'/'.join(part)}", "warning" if doubtful else "ok", note)
