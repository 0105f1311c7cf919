"""Order of `verify_{run}`: the cache files of a run, and what each should be made of.

The planner writes it; the job reads every file.
"""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import BaseModel

from latentmake import digest
from latentmake.config import Run
from latentmake.layouts import kind_of
from latentmake.plan.expected import Expected, expected_files, sources_of
from latentmake.plan.facts import Facts
from latentmake.plan.parts import (
    PROMPTS,
    RunPlan,
    known_prompts,
    parts_of,
    prompt_sources,
    prompts_of,
)

__all__ = ["Place", "VerifyOrder", "plan_verify"]


class Place(BaseModel, extra="forbid", frozen=True):
    """Cache files of one dataset and model.

    Attributes:
        folders: folders of the parts that the run needs.
        others: bases (`Layout.base`) of items of which nothing is expected: faulty ones, prompts of
            other runs.
        files: what is expected.
    """

    dataset: str
    model: str
    layout: str
    folders: list[str]
    others: list[str]
    files: list[Expected]


class VerifyOrder(BaseModel, extra="forbid", frozen=True):
    """Order to verify the caches of a run.

    Attributes:
        repair: whether files that are wrong are deleted.
        recipes: digest -> recipe, of all that are expected.
    """

    run: str
    repair: bool
    recipes: dict[str, dict[str, object]]
    places: list[Place]


def plan_verify(facts: Facts, plan: RunPlan, run: Run) -> VerifyOrder:
    """Return the order to verify a run's caches.

    Raises:
        UserError: a dataset or a model cannot be read.
    """
    parts: dict[str, list[str]] = {}
    for part in parts_of(facts.config, run):
        parts.setdefault(part.dataset, []).append(part.name)
    recipes: dict[str, dict[str, object]] = {}
    for dataset, names in parts.items():
        for kind in {kind_of(name) for name in names}:
            if recipe := facts.recipe(dataset, run.model, kind):
                recipes[digest.of_value(recipe)] = recipe
    places = [_place(facts, dataset, run, names) for dataset, names in parts.items()]
    return VerifyOrder(run=plan.name, repair=facts.options.repair, recipes=recipes, places=places)


def _place(facts: Facts, dataset: str, run: Run, parts: Sequence[str]) -> Place:
    layout = facts.layout(run.model)
    if dataset == PROMPTS:
        sources = {"text": prompt_sources(prompts_of(run))}
        owned = {source.stem for source in prompt_sources(known_prompts(facts.config, run.model))}
    else:
        sources = sources_of(facts, dataset, run.model, parts)
        items, faults = facts.items(dataset, run.model)
        owned = {item.stem for item in items} | {fault.stem for fault in faults}
    wanted = {source.stem for several in sources.values() for source in several}
    files = list(expected_files(facts, dataset, run.model, sources))
    return Place(
        dataset=dataset,
        model=run.model,
        layout=layout.name,
        folders=list(dict.fromkeys(layout.folder(dataset, run.model, part) for part in parts)),
        others=sorted({layout.base(stem) for stem in owned - wanted}),
        files=files,
    )
