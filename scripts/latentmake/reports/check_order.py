"""Order of `check_{run}`: counts of caches and faulty items as the plan found them.

The job adds what files, environment and settings say. Nothing is encoded.
"""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from latentmake.config import Run, SdScriptsTrainer, SdTrainer
from latentmake.files import atomic
from latentmake.plan.facts import Facts
from latentmake.plan.orders import run_order
from latentmake.plan.parts import RunPlan
from latentmake.training.external.musubi.order import MusubiOrder
from latentmake.training.external.musubi.plan import wan_order
from latentmake.training.external.sdscripts.order import SdScriptsOrder
from latentmake.training.external.sdscripts.plan import sdscripts_order

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
        trained: whether the run has a trainer.
        musubi: what musubi-tuner would be asked to do, or reads.
        sdscripts: what sd-scripts would be asked to do.
        sd: settings of our own trainer.
        planned: when, in nanoseconds: no two orders are the same file to Snakemake.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    run: str
    parts: list[PartCounts]
    faults: list[str]
    current: bool
    trained: bool
    musubi: MusubiOrder | None = None
    sdscripts: SdScriptsOrder | None = None
    sd: SdTrainer | None = None
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
    config, trainer = facts.config, run.trainer
    skipping = {name for name in run.datasets if config.datasets[name].on_error == "skip"}
    is_wan = config.models[run.model].layout == "musubi"
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
        trained=trainer is not None,
        musubi=wan_order(config, plan.name) if is_wan else None,
        sdscripts=sdscripts_order(config, plan.name, trainer)
        if isinstance(trainer, SdScriptsTrainer)
        else None,
        sd=trainer if isinstance(trainer, SdTrainer) else None,
        planned=time.time_ns(),
    )
    path = run_order(plan.name, "check", order.planned)
    atomic.write(path, order.model_dump_json().encode())
    return path
