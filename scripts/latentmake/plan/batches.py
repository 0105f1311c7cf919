"""Batches: the stale targets of a dataset and model, cut into orders."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from latentmake.config.datasets import Dataset
from latentmake.layouts import kind_of
from latentmake.plan.facts import Facts
from latentmake.plan.orders import Order, Work
from latentmake.plan.state import State
from latentmake.plan.target import Target
from latentmake.sources.item import Item

_Group = tuple[Item, list[Target], list[str | None]]
"""An item with its stale targets, and the digest of its inputs where that is known."""

_REUSED_ITEMS = 16_384  # of a batch that encodes nothing
_SHARED_ITEMS = 64  # of a batch, at the least, that is one so that several GPUs work
_PROMPTS = Dataset(path=".", empty_caption="allow")  # an empty prompt is meant


def batches(
    facts: Facts,
    dataset: str,
    model: str,
    asked: Mapping[str, set[str]],
    states: State,
    *,
    side_by_side: int,
) -> Iterator[tuple[Order, frozenset[str]]]:
    """Cut the stale targets of a dataset and model into orders, each with the runs that need it.

    Each is of one kind, needed by the same runs, and has either all targets of an item that are
    to be encoded or all that are at hand.

    Args:
        facts: of dataset and model.
        dataset: its name.
        model: its name.
        asked: part -> the runs that need it.
        states: of the parts.
        side_by_side: how many jobs run at a time on this machine.
    """
    groups: dict[tuple[str, frozenset[str], bool], dict[tuple[str, str | None], _Group]] = {}
    everyone = frozenset().union(*(runs for part, runs in asked.items() if "@" in part))
    for part, wanting in asked.items():
        # A text that lies beside each resolution is encoded once for all of them.
        together = everyone if "@" in part else frozenset(wanting)
        for stale in states.parts[part].stale:
            item, target = stale.item, stale.target
            group = groups.setdefault((kind_of(part), together, bool(target.at_hand)), {})
            found = group.setdefault((item.stem, item.text), (item, [], []))
            found[1].append(target)
            found[2].append(stale.content)
    for (kind, runs, at_hand), group in groups.items():
        works = [
            Work(item, tuple(targets), next(filter(None, contents), None))
            for item, targets, contents in group.values()
        ]
        size = _REUSED_ITEMS if at_hand else _batch_size(facts, model, kind, works)
        if side_by_side > 1 and not at_hand:
            size = min(size, max(_SHARED_ITEMS, -(-len(works) // side_by_side)))
        for start in range(0, len(works), size):
            yield order_of(facts, dataset, model, kind, works[start : start + size]), runs


def _batch_size(facts: Facts, model: str, kind: str, works: Sequence[Work]) -> int:
    """Return the number of items of a batch: as configured, or by the speed of past jobs."""
    from latentmake.plan.estimates import batch_items

    batch = facts.config.batch
    if batch.items != "auto":
        return batch.items
    targets = sum(len(each.targets) for each in works) / len(works)
    return batch_items(facts.memo, f"{kind} {model}", batch.minutes, targets)


def order_of(facts: Facts, dataset: str, model: str, kind: str, works: Sequence[Work]) -> Order:
    """Return the order for some work of one dataset, model and kind."""
    config = facts.config
    return Order(
        kind=kind,
        dataset=dataset,
        model=model,
        dataset_settings=config.datasets.get(dataset, _PROMPTS),
        model_settings=config.models[model],
        recipe=facts.recipe(dataset, model, kind),
        items=tuple(each._replace(item=each.item.without_stats()) for each in works),
        musubi_tuner=config.musubi_tuner if config.models[model].scripted else None,
        sd_scripts=config.sd_scripts if config.models[model].by_strategies else None,
    )
