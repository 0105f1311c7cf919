"""What a plan looks like on a terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from pydantic import ByteSize
from tabulate import tabulate

from latentmake.plan import store
from latentmake.plan.parts import Plan, RunPlan, kind_of
from latentmake.plan.staleness import REASONS

__all__ = ["plan_table", "status_lines"]


def plan_table(plan: Plan) -> str:
    """Return a table: for each dataset, model and part, how many targets are in which state."""
    # A part may be needed by several runs, and counts once.
    parts: dict[tuple[str, str, str], dict[str, list[int]]] = {}
    faults: dict[str, list[str]] = {}
    for run in plan.runs.values():
        for part, state in run.parts.items():
            reasons = Counter(stale.reason for stale in state.stale)
            counts = [state.fresh, *(reasons[reason] for reason in REASONS), len(state.orphans)]
            kind = part.name.replace("@", " ")
            # All variants of the texts count together.
            is_text = kind_of(part.name) == "text"
            kind = kind.partition(".")[0] if is_text else f"latents {kind}"
            parts.setdefault((part.dataset, part.model, kind), {})[part.name] = counts
    rows = {
        name: [sum(column) for column in zip(*of.values(), strict=True)]
        for name, of in parts.items()
    }
    for run in plan.runs.values():
        for dataset, found in run.faults.items():
            faults[dataset] = [fault.line for fault in found]
    lines = [
        tabulate(
            [[*name, *(count or "." for count in counts)] for name, counts in rows.items()],
            headers=["dataset", "model", "kind", "fresh", *REASONS, "orphaned"],
            disable_numparse=True,
            colalign=["left"] * 3 + ["right"] * (len(REASONS) + 2),
        )
    ]
    lines += [f"faulty: {line}" for lines_of in faults.values() for line in lines_of]
    total = sum(len(item.targets) for order in plan.orders for item in order.items)
    if total:
        at_hand = sum(len(order.paths) for order in plan.orders if order.reuses)
        beside = f", {at_hand} of them at hand" * bool(at_hand)
        lines.append(f"{total} targets to make{beside}, in {len(plan.orders)} jobs")
    return "\n".join([*lines, ""])


def status_lines(run: RunPlan, keep: int) -> Iterator[str]:
    """Yield every stale target of a run with its reason, and what is wrong with its items.

    Args:
        run: its plan.
        keep: bytes that the store may take.
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
    if run.manifest_order is not None:
        yield f"{run.name}: the manifest is to be written"
    if run.training_order is not None:
        yield f"{run.name}: is to be trained, or its sample pictures drawn"
    used, bound = (
        ByteSize(size).human_readable(decimal=True, separator=" ") for size in (store.used(), keep)
    )
    yield f"store: {used} of {bound} used (store.keep)"
