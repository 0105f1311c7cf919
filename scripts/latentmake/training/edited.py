"""Reasons to train that count items: what was added, removed or edited since the last training.

The lock of a run has one digest for all caches of a dataset at a resolution. Before these are
encoded, a plan counts stale targets; afterwards, it knows two digests. Both are replaced here by
the number of items, so that the same edit has the same reason until it is trained on.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from latentmake.data.item import Item
from latentmake.errors import SourceError
from latentmake.files.workspace import is_remote
from latentmake.plan.facts import Facts
from latentmake.plan.manifest import result_folder
from latentmake.plan.run_plan import RunPlan
from latentmake.plan.state import Difference
from latentmake.training.seen import SeenItem, read_seen

_TOLD = (
    r"caches of {0}/.*|\d+ of \d+ (latents|texts) of {0}: (new|edited|reusable)|"
    r"images of {0} came, went or moved|cache files without an item: \d+"
)
"""Reasons that follow from items which were added, removed or edited, of a dataset."""


def count_items(facts: Facts, plan: RunPlan) -> None:
    """Put numbers of items in place of what a plan's reasons to train tell of their caches.

    The reasons stay as they are where the items that were trained on are not known, or where they
    are those of today: then another recipe is the reason.
    """
    datasets = facts.config.runs[plan.name].datasets
    if not any(_is_told(each, name) for name in datasets for each in plan.reasons):
        return
    if not (seen := read_seen(result_folder(plan.name))):
        return
    for name in datasets:
        own = {item.stem: item for item in seen if item.dataset == name}
        if words := ", ".join(_counted(facts, name, facts.config.runs[plan.name].model, own)):
            others = [each for each in plan.reasons if not _is_told(each, name)]
            plan.reasons = [Difference(f"items of {name}: {words}"), *others]


def _is_told(reason: Difference, dataset: str) -> bool:
    return bool(re.fullmatch(_TOLD.format(re.escape(dataset)), reason.name))


def _counted(facts: Facts, dataset: str, model: str, seen: Mapping[str, SeenItem]) -> Iterator[str]:
    """Yield `3 added`, `1 removed` and `1 edited`, of those that are not 0."""
    items, layout = facts.wanted_items(dataset, model), facts.layout(model)
    known = [item for item in items if item.stem in seen]
    contents = facts.judge(dataset, model, [], known, []).contents

    def is_edited(item: Item) -> bool:
        was = seen[item.stem]
        try:
            texts = item.texts or [contents.text(item)]
        except SourceError:  # which the plan names
            return True
        if texts != was.texts or not was.source or is_remote(item.image):
            return texts != was.texts
        return contents.of(item.inputs("latents", layout)) != was.source

    counts = {
        "added": len(items) - len(known),
        "removed": len(seen.keys() - {item.stem for item in known}),
        "edited": sum(map(is_edited, known)),
    }
    yield from (f"{number} {word}" for word, number in counts.items() if number)
