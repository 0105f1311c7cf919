"""Planning of the adoption of a trainer's own caches."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

from latentmake.config import Run
from latentmake.errors import ConfigError
from latentmake.exchange.adoption import Adoption
from latentmake.plan.facts import Facts
from latentmake.plan.parts import PROMPTS, RunPlan

__all__ = ["CachesOrder", "plan_caches"]


class CachesOrder(BaseModel):
    """Order to adopt a trainer's own caches for a run's stale targets.

    Attributes:
        orders: names of the work orders with the stale targets of datasets with `adopt_from`.
        folders: dataset -> its `adopt_from`.
        fresh: targets up to date.
        stale: targets of those work orders.
        passed: stale targets of other datasets, or that are at hand.
        planned: time in nanoseconds; names the receipts.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    kind: Literal["trainer_caches"] = "trainer_caches"
    run: str
    orders: list[str]
    folders: dict[str, list[str]]
    fresh: int
    stale: int
    passed: int
    planned: int

    @property
    def adoption(self) -> Adoption:
        """Stale targets to adopt."""
        return Adoption(self.run, self.orders, self.fresh, self.passed, self.stale, self.planned)


def plan_caches(facts: Facts, plan: RunPlan, run: Run) -> CachesOrder:
    """Return the order to adopt caches for a run's stale targets.

    Raises:
        ConfigError: no folder of caches is named, or one is missing.
    """
    named = {name: facts.config.datasets[name].adopt_from for name in run.datasets}
    folders = {name: paths for name, paths in named.items() if paths}
    if not folders:
        raise ConfigError(
            "no dataset of the run says where its caches are",
            where=f"adopt_{plan.name}",
            hint=f"set datasets.{run.datasets[0]}.adopt_from to their folder",
        )
    for name, paths in folders.items():
        for path in paths:
            if not Path(path).is_dir():
                what = f"{path} is no folder" if Path(path).exists() else f"{path} does not exist"
                raise ConfigError(
                    what, where=f"datasets.{name}.adopt_from", hint="name the folder of the caches"
                )
    works = [order for order in plan.orders if order.dataset in folders and not order.reuses]
    states = [(part, state) for part, state in plan.parts.items() if part.dataset != PROMPTS]
    stale = sum(len(order.paths) for order in works)
    return CachesOrder(
        run=plan.name,
        orders=[order.name for order in works],
        folders=folders,
        fresh=sum(state.fresh for _, state in states),
        stale=stale,
        passed=sum(len(state.stale) for _, state in states) - stale,
        planned=time.time_ns(),
    )
