"""Lines that name what differs in the recipes of stale targets."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator

from latentmake.layouts import kind_of
from latentmake.models.reasons import some
from latentmake.plan.facts import Facts
from latentmake.plan.run_plan import RunPlan
from latentmake.plan.state import Stale
from latentmake.plan.target import Part


def recipe_changes(facts: Facts, runs: Collection[RunPlan]) -> Iterator[str]:
    """Yield a line for all targets of a model and kind that are stale by the same differences.

    The header of one cache file of each distinct recipe of a dataset is read.
    """
    first: dict[tuple[str, str, str, str], tuple[Part, Stale]] = {}
    numbers: dict[tuple[str, str, str, str], int] = defaultdict(int)
    for part, state in {part: state for run in runs for part, state in run.parts.items()}.items():
        kind = kind_of(part.name)
        for each in state.stale:
            if each.reason == "changed recipe":
                group = part.dataset, part.model, kind, each.recipe
                first.setdefault(group, (part, each))
                numbers[group] += 1
    counts: dict[tuple[str, str, str], dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for group, (part, stale) in first.items():
        dataset, model, kind, _ = group
        counts[model, kind, f"recipe: {_difference(facts, part, stale)}"][dataset] += numbers[group]
    for (model, kind, words), datasets in counts.items():
        whose = f" ({model})" * (len(facts.config.models) > 1)
        targets = f"text{'s' * (sum(datasets.values()) > 1)}" if kind == "text" else kind
        yield f"{words}: {sum(datasets.values())} {targets} of {some(datasets)}{whose}"


def _difference(facts: Facts, part: Part, stale: Stale) -> str:
    from latentmake.plan.explain import PLACED, differences

    if not facts.recipe(part.dataset, part.model, kind_of(part.name)):
        return f"unknown without the model {part.model}"
    found = differences(facts, None, part, stale)
    settings = some([str(each) for each in found if each.name != PLACED])
    return settings or (PLACED if found else "keys in headers")
