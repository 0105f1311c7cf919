"""Order of `report_{run}`: caches, recipes and speed of past jobs, as far as planned.

The planner writes it; the job reads caches and results of trainings, and writes the page.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from typing import NamedTuple

from pydantic import BaseModel, JsonValue

from latentmake.config import Run
from latentmake.layouts import kind_of
from latentmake.plan.facts import Facts
from latentmake.plan.manifest_job import manifest_items
from latentmake.plan.parts import PROMPTS, Part, RunPlan, prompt_path, prompts_of
from latentmake.reports.items_order import ItemsOrder, plan_items

__all__ = ["PartReport", "ReportOrder", "Speed", "plan_report"]


class PartReport(NamedTuple):
    """State of one part at planning.

    Attributes:
        stale: number by reason.
        paths: of its cache files, whether they exist or not.
    """

    dataset: str
    part: str
    fresh: int
    stale: dict[str, int]
    orphans: int
    paths: list[str]


class Speed(NamedTuple):
    """Speed of past jobs of a kind and model: targets in a second, and words on the bottleneck."""

    work: str
    speed: float
    words: str


class ReportOrder(BaseModel, extra="forbid", frozen=True):
    """Order of a run's page.

    Attributes:
        contact: its items, datasets and model.
        trainer: settings of the trainer; None without one.
        recipes: what is encoded (`latents of cats`, `text`) -> recipe; {} where the model is
            not here.
        planned: seconds since 1970.
    """

    contact: ItemsOrder
    trainer: dict[str, JsonValue] | None
    parts: list[PartReport]
    recipes: dict[str, dict[str, JsonValue]]
    speeds: list[Speed]
    planned: float


def plan_report(facts: Facts, plan: RunPlan, run: Run) -> ReportOrder:
    """Return the order of a run's page.

    Raises:
        UserError: a dataset or the model cannot be read.
    """
    kinds = {kind_of(part.name) for part in plan.parts}
    work = [f"{kind} {run.model}" for kind in sorted(kinds)]
    paths = _paths(facts, run)
    rates = {name: facts.memo.rate(name) for name in work}
    return ReportOrder(
        contact=plan_items(facts, plan, run),
        trainer=None if run.trainer is None else run.trainer.model_dump(mode="json"),
        parts=[
            PartReport(
                part.dataset,
                part.name,
                state.fresh,
                dict(Counter(each.reason for each in state.stale)),
                len(state.orphans),
                paths.get(part, []),
            )
            for part, state in sorted(plan.parts.items())
        ],
        recipes=_recipes(facts, run, kinds),
        speeds=[Speed(name, rate.speed, rate.words) for name, rate in rates.items() if rate],
        planned=time.time(),
    )


def _paths(facts: Facts, run: Run) -> dict[Part, list[str]]:
    """Return part -> paths of its cache files."""
    found: defaultdict[Part, list[str]] = defaultdict(list)
    texts = dict.fromkeys(prompts_of(run))
    paths = [prompt_path(facts.config, run.model, text) for text in texts]
    found[Part(PROMPTS, run.model, "text")] = paths
    for item in manifest_items(facts, run, {}, {}):
        for name, targets in item.targets.items():
            found[Part(item.dataset, run.model, name)] += [path for path, _ in targets]
    return found


def _recipes(facts: Facts, run: Run, kinds: set[str]) -> dict[str, dict[str, JsonValue]]:
    """Return name -> recipe; datasets that are encoded alike share one."""
    found: dict[str, dict[str, object]] = {}
    if "latents" in kinds:
        found |= {f"latents of {x}": facts.recipe(x, run.model, "latents") for x in run.datasets}
    if "text" in kinds:
        found["text"] = facts.recipe("", run.model, "text")
    return found  # type: ignore[return-value]  # recipes are JSON values
