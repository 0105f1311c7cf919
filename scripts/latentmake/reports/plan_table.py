"""A plan as a table: the number of targets in each state."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

from tabulate import tabulate

from latentmake.layouts.layout import parsed
from latentmake.plan.run_plan import Plan
from latentmake.plan.state import REASONS
from latentmake.plan.target import Part


def plan_table(plan: Plan, estimates: Iterable[str] = ()) -> str:
    """Return a table: number of targets in each state, by dataset, model and part.

    `estimates` are lines about what is to be made.
    """
    parts: dict[tuple[str, str, str], dict[str, list[int]]] = {}  # a part of several runs once
    for run in plan.runs.values():
        for part, state in run.parts.items():
            reasons = Counter(stale.reason for stale in state.stale)
            counts = [state.fresh, *(reasons[reason] for reason in REASONS), len(state.orphans)]
            parts.setdefault(row_of(part), {})[part.name] = counts
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
        by_place = sorted(found, key=lambda fault: _in_numbers(fault.path))
        lines += [f"faulty: {fault.line}" for fault in by_place]
    made = Counter[str]()
    for order in plan.orders:
        made[order.kind] += sum(len(item.targets) for item in order.items)
    if total := made.total():
        reused = sum(len(order.paths) for order in plan.orders if order.reuses)
        linked = f", {reused} of them by linking" * bool(reused)
        lines.append(
            f"{counted(total, 'target')} to make ({counted(made['latents'], 'latent')}, "
            f"{counted(made['text'], 'text')}){linked}, in {counted(len(plan.jobs), 'job')}"
        )
    lines += estimates
    return "\n".join([*lines, ""])


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: `1 target`, `2 targets`."""
    return f"{number} {noun}{'s' * (number != 1)}"


def _in_numbers(name: str) -> list[tuple[int, str]]:
    """Return a sort key by which `line 9` stands before `line 10`."""
    parts = re.split(r"([0-9]+)", name)
    return [(int(part), "") if part.isdecimal() else (0, part) for part in parts]


def row_of(part: Part) -> tuple[str, str, str]:
    """Return dataset, model and kind of a part's row: all variants of a text make one."""
    kind = f"latents {part.name}"
    if parsed(part.name).kind == "text":
        text, _, resolution = part.name.partition("@")
        kind = f"{text.partition('.')[0]} {resolution}".rstrip()
    return part.dataset, part.model, kind
