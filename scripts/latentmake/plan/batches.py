"""Work cut into jobs: which targets go together, and how many.

All that one order needs stands in it, so that whoever carries it out asks nobody else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from latentmake.config import Dataset
from latentmake.plan.facts import Facts
from latentmake.plan.keys import Source
from latentmake.plan.orders import Target, WorkItem, WorkOrder
from latentmake.plan.parts import kind_of, size_of
from latentmake.plan.staleness import Evaluation

__all__ = ["batches", "minutes_of", "work_order"]

_REUSED_ITEMS = 16_384  # of a job that encodes nothing
_PROMPTS = Dataset(path=".", empty_caption="allow")  # an empty prompt is meant
_UNKNOWN_ITEMS = 1024  # of a job, where no past job tells how long it takes


def batches(
    facts: Facts,
    dataset: str,
    model: str,
    asked: Mapping[str, set[str]],
    states: Mapping[tuple[str, str], Evaluation],
) -> Iterator[tuple[WorkOrder, str, frozenset[str]]]:
    """Cut what is stale of a dataset and model into jobs.

    Each is of one kind, needed by the same runs, and has of an item all that is to be encoded, or
    all that is at hand.

    Args:
        facts: knows recipes and settings.
        dataset: its name.
        model: its name.
        asked: part -> the runs that need it.
        states: (dataset, model) -> what is stale.

    Yields:
        A work order, its kind, and the runs that need it.
    """
    groups: dict[tuple[str, frozenset[str], bool], dict[Source, list[Target]]] = {}
    contents: dict[Source, str] = {}
    everyone = frozenset().union(*(runs for part, runs in asked.items() if "@" in part))
    for part, wanting in asked.items():
        # A text that lies beside each resolution is encoded once for all of them.
        together = everyone if "@" in part else frozenset(wanting)
        for stale in states[dataset, model].parts[part].stale:
            target = Target(part, stale.path, stale.found, size_of(part), stale.clip, stale.at_hand)
            group = groups.setdefault((kind_of(part), together, bool(stale.at_hand)), {})
            group.setdefault(stale.source, []).append(target)
            if stale.content is not None:
                contents[stale.source] = stale.content
    for (kind, runs, at_hand), group in groups.items():
        work = [
            WorkItem(
                source.stem,
                source.path,
                source.text,
                tuple(targets),
                source.control,
                source.media,
                contents.get(source),
            )
            for source, targets in group.items()
        ]
        size = _REUSED_ITEMS if at_hand else _batch_size(facts, f"{kind} {model}", work)
        for start in range(0, len(work), size):
            batch = tuple(work[start : start + size])
            yield work_order(facts, dataset, model, kind, batch), kind, runs


def _batch_size(facts: Facts, name: str, work: Sequence[WorkItem]) -> int:
    """Return how many items a job gets: what is asked for, or what past jobs did in the time.

    Starting a job shall be a tenth of it at most, however short the time asked for.
    """
    batch = facts.config.batch
    if batch.items != "auto":
        return batch.items
    rate = facts.memo.rate(name)
    if rate is None or not work:
        return _UNKNOWN_ITEMS
    seconds = max(batch.minutes * 60 - rate.starting, 9 * rate.starting)
    each = sum(len(item.targets) for item in work) / len(work)
    return max(1, int(seconds * rate.targets / each))


def minutes_of(facts: Facts, order: WorkOrder) -> float | None:
    """Return how long a job will take, where past jobs of its kind and model tell."""
    rate = facts.memo.rate(order.work)
    if rate is None:
        return None
    return (rate.starting + len(order.paths) / rate.targets) / 60


def work_order(
    facts: Facts, dataset: str, model: str, kind: str, work: tuple[WorkItem, ...]
) -> WorkOrder:
    """Return the order for some work of one dataset, model and kind."""
    return WorkOrder(
        kind=kind,
        dataset=dataset,
        model=model,
        dataset_settings=facts.config.datasets.get(dataset, _PROMPTS),
        model_settings=facts.config.models[model],
        recipe=facts.recipe(dataset, model, kind),
        items=work,
        musubi_tuner=facts.config.musubi_tuner if facts.config.models[model].scripted else None,
    )
