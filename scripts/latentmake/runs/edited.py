"""Reasons to train that count items: what was added, removed or edited since the last training.

The lock of a run has one digest for all caches of a dataset at a resolution. While caches are
outdated, a plan counts targets; once they are encoded, it can only compare two digests. This module
replaces both kinds of reasons by a number of items. The same edit then has the same reason until
the run is trained again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any

from latentmake.base.errors import SourceError, UserError
from latentmake.data.contents import Contents
from latentmake.data.item import Item
from latentmake.plan.facts import Facts
from latentmake.plan.manifest import result_folder
from latentmake.plan.product import Difference
from latentmake.plan.run_plan import RunPlan
from latentmake.runs.differences import compare, counts, in_words
from latentmake.runs.history import RosterItem, items_of

_FROM_ITEMS = (
    r"caches of {0}/.*|\d+ of \d+ (latents|texts) of {0}: (new|edited|reusable)|"
    r"images of {0} came, went or moved|cache files without an item: \d+"
)
"""Reasons that come from items of a dataset which were added, removed or edited."""
COUNTED = "items of "
"""Begin of a reason that counts items."""


def count_items(facts: Facts, plan: RunPlan) -> None:
    """Replace a plan's reasons to train that are about caches by numbers of items.

    The reasons stay if there is no list of the items that the last training saw. They also stay if
    today's items are the same as then: the recipe must have changed.
    """
    datasets = facts.config.runs[plan.name].datasets
    if any(_follows(reason, name) for name in datasets for reason in plan.reasons):
        seen = items_of(result_folder(plan.name)) or []
        plan.reasons = with_items(facts, plan.name, seen, plan.reasons)


def with_items(
    facts: Facts, run: str, seen: Iterable[RosterItem], reasons: Iterable[Difference]
) -> list[Difference]:
    """Return reasons to train, with numbers of items in place of those that follow from items.

    Args:
        facts: facts about the configuration.
        run: name of the run.
        seen: items that a training saw; none if they are unknown.
        reasons: reasons to train, or differences from that training.
    """
    items, reasons = [*seen], [*reasons]
    for name in facts.config.runs[run].datasets if items else ():
        own = [item for item in items if item.dataset == name]
        changes = compare(own, todays_items(facts, run, own, [name]))
        if words := in_words(counts(changes)):
            others = [reason for reason in reasons if not _follows(reason, name)]
            reasons = [Difference(f"{COUNTED}{name}: {words}"), *others]
    return reasons


def edits_since(facts: Facts, run: str) -> tuple[dict[str, dict[str, Any]], list[str]] | None:
    """Return the edits since the last training of a run, and the stems of items that are gone.

    The edits are dictionaries by the items' names: `new`, or `before` (the texts that the training
    saw), `repainted` or both. The result is None if no training is recorded.
    """
    seen = items_of(result_folder(run))
    if not seen:
        return None
    texts = {item.name: item.texts for item in seen}
    edits, gone = dict[str, dict[str, Any]](), list[str]()
    for kind, name, former, _ in compare(seen, todays_items(facts, run, seen)):
        own = edits.setdefault(name, {})
        if kind in ("added", "renamed"):
            own["new"] = True
        elif kind == "replaced":
            own["repainted"] = True
        elif kind == "caption" and name in texts:
            own["before"] = texts[name]
        gone += {"removed": [name], "renamed": [former]}.get(kind, [])
    return edits, sorted(name.partition("/")[2] for name in gone)


def _follows(reason: Difference, dataset: str) -> bool:
    """Whether a reason follows from items of a dataset."""
    return bool(re.fullmatch(_FROM_ITEMS.format(re.escape(dataset)), reason.name))


def todays_items(
    facts: Facts,
    run: str,
    seen: Iterable[RosterItem],
    datasets: Iterable[str] | None = None,
    say: Callable[[str], object] = str,
) -> Iterator[RosterItem]:
    """Yield today's items of a run's datasets, as a roster would have them.

    Values that only a build finds out, and contents that cannot be read, are those of `seen`;
    `say` is called with each fault.
    """
    settings = facts.config.runs[run]
    by_name, by_source = {}, {}
    for old in seen:
        by_name[old.name] = by_source[old.source] = old
    by_source.pop("", None)
    for name in settings.datasets if datasets is None else datasets:
        dataset = facts.config.datasets[name]
        for item, own in todays_contents(facts, name, settings.model, say):
            own |= {"dataset": name, "stem": item.stem, "is_reg": dataset.is_reg}
            if not dataset.is_reg:  # repeats of others are balanced when the manifest is written
                own["repeats"] = dataset.num_repeats
            was = by_name.get(f"{name}/{item.stem}") or by_source.get(own.get("source", ""))
            yield was.model_copy(update=own) if was else RosterItem(**own)


def all_contents(facts: Facts) -> Iterator[tuple[str, Item, dict[str, Any]]]:
    """Yield dataset, item and contents of `todays_contents`, of all datasets that runs use."""
    runs = facts.config.runs.values()
    for dataset, model in dict.fromkeys((name, run.model) for run in runs for name in run.datasets):
        with suppress(UserError):  # for example, all its pictures are deleted
            for item, contents in todays_contents(facts, dataset, model):
                yield dataset, item, contents


def todays_contents(
    facts: Facts, dataset: str, model: str, say: Callable[[str], object] = str
) -> Iterator[tuple[Item, dict[str, Any]]]:
    """Yield today's items of a dataset with `source` and `texts` of a roster, if they are readable.

    The source of an item at a URL is unknown. `say` is called with each fault.
    """
    items, layout = facts.wanted_items(dataset, model), facts.layout(model)
    files = (file for item in items for file in item.files)
    contents = Contents(files, facts.memo, facts.config.datasets[dataset])
    for item in items:
        own: dict[str, Any] = {}
        if not item.is_remote and (source := contents.of(item.inputs("latents", layout))):
            own["source"] = source
        try:
            own["texts"] = item.texts or [contents.text(item)]
        except SourceError as error:
            say(str(error))
        yield item, own
