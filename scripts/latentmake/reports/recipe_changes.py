"""What differs in recipe and placement of stale targets, in the words of the configuration."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Collection, Iterator
from contextlib import suppress

from latentmake.errors import CacheError, SourceError
from latentmake.files.cachefile import read_header, read_recipe, target_key
from latentmake.layouts import kind_of
from latentmake.models.reasons import Difference, some, text_of
from latentmake.models.recipe_differences import recipe_differences
from latentmake.plan.facts import Facts
from latentmake.plan.run_plan import RunPlan
from latentmake.plan.state import Judge, Stale
from latentmake.plan.target import Part, view_of

PLACED = "size and crop"
"""Name of the difference between two placements of an image."""


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
    if not facts.recipe(part.dataset, part.model, kind_of(part.name)):
        return f"unknown without the model {part.model}"
    found = differences(facts, None, part, stale)
    settings = some([str(each) for each in found if each.name != PLACED])
    return settings or (PLACED if found else "keys in headers")


def differences(facts: Facts, judge: Judge | None, part: Part, stale: Stale) -> list[Difference]:
    """Return what differs between recipe and placement of a file and those of today.

    Args:
        facts: of the model.
        judge: of the target; asked for where it is None.
        part: of the target.
        stale: a target with a file of another key.
    """
    now = facts.recipe(part.dataset, part.model, kind_of(part.name))
    found = []
    if now:
        model = facts.config.models[part.model]
        found = recipe_differences(read_recipe(stale.path), now, model)
    some = ([stale.item], [stale.path])
    judge = judge or facts.judge(part.dataset, part.model, [part.name], some)
    with suppress(CacheError, OSError):
        found += _placing_differences(judge, stale)
    return found


def _placing_differences(judge: Judge, stale: Stale) -> list[Difference]:
    """Return how the placement of an image differs in a file; nothing where it is the same.

    The last one is the placement itself, after the settings that changed it. A file of an earlier
    release does not say its settings.
    """
    header, today = read_header(stale.path), judge.settings
    item, target, content = stale.item, stale.target, header.source
    now, size = (
        judge.view(item, target, content, header),
        judge.contents.size(item, content, header),
    )
    if today is None or not now or target_key(content, header.recipe, now) == header.key:
        return []
    with suppress(ValueError, SourceError):
        before = today.placed(json.loads(header.view or "{}"))
        was = size and view_of(judge.layout, before, item, target, size)
        if was is not None and target_key(content, header.recipe, was) == header.key:
            changed = [
                Difference(key, text_of(getattr(before, key)), text_of(getattr(today, key)))
                for key in dict.fromkeys((*before.placing(), *today.placing()))
                if getattr(before, key) != getattr(today, key)
            ]
            return [*changed, Difference(PLACED, was, now)]
    return [Difference(PLACED, "others", now)]
