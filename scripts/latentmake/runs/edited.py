"""Reasons to train that count items: what was added, removed or edited since the last training.

The lock of a run has one digest for all caches of a dataset at a resolution. While caches are
outdated, a plan counts targets; once they are encoded, it can only compare two digests. This module
replaces both kinds of reasons by a number of items. The same edit then has the same reason until
the run is trained again.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

from latentmake.base.errors import SourceError
from latentmake.data.contents import Contents
from latentmake.data.item import Item
from latentmake.plan.facts import Facts
from latentmake.plan.manifest import result_folder
from latentmake.plan.product import Difference
from latentmake.plan.run_plan import RunPlan
from latentmake.runs.history import RosterItem, items_of

_FROM_ITEMS = (
    r"caches of {0}/.*|\d+ of \d+ (latents|texts) of {0}: (new|edited|reusable)|"
    r"images of {0} came, went or moved|cache files without an item: \d+"
)
"""Reasons that come from items of a dataset which were added, removed or edited."""


def count_items(facts: Facts, plan: RunPlan) -> None:
    """Replace a plan's reasons to train that are about caches by numbers of items.

    The reasons stay if there is no list of the items that the last training saw. They also stay if
    today's items are the same as then: the recipe must have changed.
    """
    datasets = facts.config.runs[plan.name].datasets
    if not any(_follows(reason, name) for name in datasets for reason in plan.reasons):
        return
    if not (seen := items_of(result_folder(plan.name))):
        return
    for name in datasets:
        own = {item.stem: item for item in seen if item.dataset == name}
        if words := ", ".join(_counted(facts, name, facts.config.runs[plan.name].model, own)):
            others = [reason for reason in plan.reasons if not _follows(reason, name)]
            plan.reasons = [Difference(f"items of {name}: {words}"), *others]


def item_differences(facts: Facts, run: str, seen: Iterable[RosterItem]) -> Iterator[Difference]:
    """Yield the numbers of today's items that differ from those that a training saw."""
    settings, items = facts.config.runs[run], [*seen]
    for name in settings.datasets if items else ():
        own = {item.stem: item for item in items if item.dataset == name}
        if words := ", ".join(_counted(facts, name, settings.model, own)):
            yield Difference(f"items of {name}: {words}")


def _follows(reason: Difference, dataset: str) -> bool:
    """Whether a reason follows from items of a dataset."""
    return bool(re.fullmatch(_FROM_ITEMS.format(re.escape(dataset)), reason.name))


def _counted(
    facts: Facts, dataset: str, model: str, seen: Mapping[str, RosterItem]
) -> Iterator[str]:
    """Yield `3 added`, `1 removed` and `1 edited`; a number that is 0 is left out."""
    items, layout = facts.wanted_items(dataset, model), facts.layout(model)
    kept = [item for item in items if item.stem in seen]
    files = (file for item in kept for file in item.files)
    contents = Contents(files, facts.memo, facts.config.datasets[dataset])

    def is_edited(item: Item) -> bool:
        was = seen[item.stem]
        try:
            texts = item.texts or [contents.text(item)]
        except SourceError:  # the plan names it
            return True
        if texts != was.texts or not was.source or item.is_remote:
            return texts != was.texts
        return contents.of(item.inputs("latents", layout)) != was.source

    counts = {
        "added": len(items) - len(kept),
        "removed": len(seen.keys() - {item.stem for item in kept}),
        "edited": sum(map(is_edited, kept)),
    }
    yield from (f"{number} {word}" for word, number in counts.items() if number)
