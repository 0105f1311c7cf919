"""Report of a plan: its table and estimates, and disks without room."""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from latentmake.files.disk import human, shortages
from latentmake.plan import estimates
from latentmake.plan.facts import Facts
from latentmake.plan.orders import Order
from latentmake.plan.run_plan import Plan
from latentmake.reports.plan_table import counted, plan_table


def report(
    facts: Facts,
    plan: Plan,
    trained: Collection[str],
    orders: Iterable[Order],
    *,
    dry: bool,
) -> None:
    """Print the table of a plan, unless all that is asked for is a status, which has its own.

    Args:
        facts: of its runs.
        plan: the plan.
        trained: runs whose training is asked for.
        orders: those that a build carries out.
        dry: whether nothing is built, so that a disk without room is no more than a warning.

    Raises:
        StorageError: what is to be built has no room.
    """
    asked = [run for name, run in plan.runs.items() if name in trained]
    lines = [*estimates.lines(facts.memo, plan.orders)]
    lines += [f"training of {run.name}: {run.forecast}" for run in asked if run.forecast]
    lines += [line for run in asked for line in (run.reason, run.note) if line]
    runs = plan.runs.values()
    stale = [each for run in runs for state in run.parts.values() for each in state.stale]
    if any(each.target.size is not None for each in stale):
        from latentmake.reports.fitting import fitting_lines

        lines = [*dict.fromkeys(fitting_lines(facts, plan)), *lines]
    if any(each.reason == "changed recipe" for each in stale):
        from latentmake.reports.recipe_changes import recipe_changes

        lines = [*recipe_changes(facts, runs), *lines]
    lines += [
        f"{need.what}: {human(need.size)} in {need.folder}" for need in plan.needs if need.size
    ]
    if plan.runs:
        sys.stderr.write(plan_table(plan, lines) + "\n")
    caches = estimates.needs(facts.memo, orders)
    for shortage in shortages(
        [*caches, *plan.needs, *(need for run in asked for need in run.needs)]
    ):
        if not dry:
            raise shortage
        sys.stderr.write(f"warning: {shortage}\n")


def report_built(orders: Sequence[Order]) -> None:
    """Print how many targets a build encoded: `1 text encoded, 0 latents`."""
    from latentmake.plan.receipts import read_receipt

    counts = Counter[str]()
    for order in orders:
        with contextlib.suppress(OSError, ValueError):
            counts[order.kind] += read_receipt(order.receipt).counts["encoded"]
    latents = counted(counts["latents"], "latent")
    sys.stderr.write(f"{counted(counts['text'], 'text')} encoded, {latents}\n")
