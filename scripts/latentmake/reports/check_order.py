"""Order of `check_{run}`: counts of caches and faulty items as the plan found them.

The job adds what files, environment and settings say. Nothing is encoded.
"""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from latentmake.config import Run
from latentmake.files import atomic
from latentmake.plan.facts import Facts
from latentmake.plan.orders import run_order
from latentmake.plan.parts import RunPlan

__all__ = ["CheckOrder", "PartCounts", "plan_check"]


class PartCounts(BaseModel):
    """Counts of one part of a run.

    Attributes:
        name: dataset, model and part.
        fresh: cache files that need nothing.
        stale: reason -> cache files that are encoded anew; `new` is missing ones.
        orphans: cache files whose items are gone.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    name: str
    fresh: int
    stale: dict[str, int]
    orphans: int


class CheckOrder(BaseModel):
    """What is known of a run before its checklist.

    Attributes:
        run: its name.
        parts: its caches.
        faults: items that a build would end with, a line each.
        current: whether manifest and lock are up to date, so that they can be checked.
        trainer: path of its trainer's order; None without a trainer.
        planned: when, in nanoseconds: no two orders are the same file to Snakemake.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    run: str
    parts: list[PartCounts]
    faults: list[str]
    current: bool
    trainer: str | None = None
    planned: int = 0


def plan_check(facts: Facts, plan: RunPlan, run: Run) -> Path:
    """Write the order of a run's checklist.

    Args:
        facts: of its datasets.
        plan: of the run.
        run: its section of the configuration.

    Returns:
        Path of the order.

    Raises:
        StorageError: the disk is full or cannot be written.
    """
    datasets = facts.config.datasets
    skipping = {name for name in run.datasets if datasets[name].on_error == "skip"}
    order = CheckOrder(
        run=plan.name,
        parts=[
            PartCounts(
                name=f"{part.dataset}/{part.model}/{part.name}",
                fresh=state.fresh,
                stale=dict(Counter(each.reason for each in state.stale)),
                orphans=len(state.orphans),
            )
            for part, state in sorted(plan.parts.items())
        ],
        faults=[
            fault.line
            for name, faults in plan.faults.items()
            if name not in skipping
            for fault in faults
        ],
        current=plan.manifest_order is None,
        trainer=None if plan.trainer_order is None else str(plan.trainer_order),
        planned=time.time_ns(),
    )
    path = run_order(plan.name, "check", order.planned)
    atomic.write(path, order.model_dump_json().encode())
    return path
