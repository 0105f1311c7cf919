"""A plan as text: the table before a build, and the lines of `status_{run}`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from pydantic import ByteSize
from tabulate import tabulate

from latentmake.index.memo import Memo
from latentmake.layouts import kind_of
from latentmake.plan import store
from latentmake.plan.parts import Plan, RunPlan
from latentmake.plan.staleness import REASONS
from latentmake.reports.natural import natural_key

__all__ = ["plan_table", "status_lines"]


def plan_table(plan: Plan, estimates: Iterable[str] = ()) -> str:
    """Return a table: number of targets in each state, by dataset, model and part.

    `estimates` are lines about what is to be made.
    """
    parts: dict[tuple[str, str, str], dict[str, list[int]]] = {}  # a part of several runs once
    for run in plan.runs.values():
        for part, state in run.parts.items():
            reasons = Counter(stale.reason for stale in state.stale)
            counts = [state.fresh, *(reasons[reason] for reason in REASONS), len(state.orphans)]
            kind = f"latents {part.name}"
            if kind_of(part.name) == "text":  # all variants make one row
                text, _, resolution = part.name.partition("@")
                kind = f"{text.partition('.')[0]} {resolution}".rstrip()
            parts.setdefault((part.dataset, part.model, kind), {})[part.name] = counts
    rows = {
        name: [sum(column) for column in zip(*of.values(), strict=True)]
        for name, of in parts.items()
    }
    faults = {name: found for run in plan.runs.values() for name, found in run.faults.items()}
    lines = [
        tabulate(
            [[*name, *(count or "." for count in counts)] for name, counts in rows.items()],
            headers=["dataset", "model", "kind", "fresh", *REASONS, "orphaned"],
            disable_numparse=True,
            colalign=["left"] * 3 + ["right"] * (len(REASONS) + 2),
        )
    ]
    for found in faults.values():
        by_place = sorted(found, key=lambda fault: natural_key(fault.path))
        lines += [f"faulty: {fault.line}" for fault in by_place]
    total = sum(len(item.targets) for order in plan.orders for item in order.items)
    if total:
        at_hand = sum(len(order.paths) for order in plan.orders if order.reuses)
        beside = f", {at_hand} of them at hand" * bool(at_hand)
        lines.append(f"{total} targets to make{beside}, in {len(plan.jobs)} jobs")
    lines += estimates
    return "\n".join([*lines, ""])


def status_lines(run: RunPlan, keep: int, memo: Memo) -> Iterator[str]:
    """Yield a run's stale targets with their reasons, and its faulty items.

    Args:
        run: its plan.
        keep: bound of the store, in bytes.
        memo: knows the speed of past jobs.
    """
    stale = 0
    for state in run.parts.values():
        for each in state.stale:
            stale += 1
            yield f"{each.reason:15} {each.path}"
        for path in state.orphans:
            yield f"{'orphaned':15} {path}"
    for found in run.faults.values():
        for fault in found:
            yield f"{'faulty':15} {fault.line}"
    fresh = sum(state.fresh for state in run.parts.values())
    yield f"{run.name}: {fresh} targets fresh, {stale} stale"
    for work in dict.fromkeys((kind_of(part.name), part.model) for part in run.parts):
        if rate := memo.rate(" ".join(work)):
            words = rate.words and f", {rate.words}"
            yield f"past jobs of {' of '.join(work)}: {_speed(rate.speed)} targets/s{words}"
    if run.manifest_order is not None:
        yield f"{run.name}: the manifest is to be written"
    if run.training_order is not None:
        yield f"{run.name}: is to be trained, or its sample pictures drawn"
    used, bound = (
        ByteSize(size).human_readable(decimal=True, separator=" ") for size in (store.used(), keep)
    )
    yield f"store: {used} of {bound} used (store.keep)"


def _speed(targets: float) -> str:
    return f"{targets:,.0f}" if targets >= 10 else f"{targets:.2g}"
