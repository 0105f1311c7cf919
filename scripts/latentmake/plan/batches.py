"""Batches: the stale targets of a dataset and model, cut into work orders."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from latentmake.config.datasets import Dataset
from latentmake.index.memo import Memo
from latentmake.layouts import beside, kind_of, size_of
from latentmake.plan.amounts import amount_of, order_amount
from latentmake.plan.facts import Facts
from latentmake.plan.keys import Source
from latentmake.plan.orders import Target, WorkItem, WorkOrder
from latentmake.plan.staleness import Evaluation

_Name = tuple[str, str | None]
"""Stem and text of a source: the sources of one kind with the same are equal."""

_REUSED_ITEMS = 16_384  # of a batch that encodes nothing
_UNKNOWN_ITEMS = 1024  # of a batch of unknown speed
_SHARED_ITEMS = 64  # of a batch, at the least, that is one so that several GPUs work
_PROMPTS = Dataset(path=".", empty_caption="allow")  # an empty prompt is meant


def batches(
    facts: Facts,
    dataset: str,
    model: str,
    asked: Mapping[str, set[str]],
    state: Evaluation,
    *,
    side_by_side: int = 1,
) -> Iterator[tuple[WorkOrder, frozenset[str]]]:
    """Cut the stale targets of a dataset and model into work orders.

    Each is of one kind, needed by the same runs, and has either all targets of an item that are
    to be encoded or all that are at hand.

    Args:
        facts: of dataset and model.
        dataset: its name.
        model: its name.
        asked: part -> the runs that need it.
        state: of the parts.
        side_by_side: how many jobs run at a time on this machine.

    Yields:
        Work orders, each with the runs that need it.
    """
    groups: dict[tuple[str, frozenset[str], bool], dict[_Name, tuple[Source, list[Target]]]] = {}
    contents: dict[tuple[str, _Name], str] = {}
    everyone = frozenset().union(*(runs for part, runs in asked.items() if "@" in part))
    for part, wanting in asked.items():
        # A text that lies beside each resolution is encoded once for all of them.
        together = everyone if "@" in part else frozenset(wanting)
        kind, own, other = kind_of(part), size_of(part), beside(part)
        for stale in state.parts[part].stale:
            source = stale.source
            resolution = own if source.image is None else other  # as `resolution_of` says
            target = Target(part, stale.path, stale.found, resolution, stale.clip, stale.at_hand)
            group = groups.setdefault((kind, together, bool(stale.at_hand)), {})
            name = source.stem, source.text
            if name not in group:
                group[name] = source, []
            group[name][1].append(target)
            if stale.content is not None:
                contents[kind, name] = stale.content
    for (kind, runs, at_hand), group in groups.items():
        work = [
            work_item(source, targets, contents.get((kind, name)))
            for name, (source, targets) in group.items()
        ]
        size = _REUSED_ITEMS if at_hand else _batch_size(facts, dataset, model, kind, work)
        if side_by_side > 1 and not at_hand:
            size = min(size, max(_SHARED_ITEMS, -(-len(work) // side_by_side)))
        for start in range(0, len(work), size):
            yield work_order(facts, dataset, model, kind, work[start : start + size]), runs


def _batch_size(facts: Facts, dataset: str, model: str, kind: str, work: Sequence[WorkItem]) -> int:
    """Return the number of items of a batch: as configured, or by the speed of past jobs.

    Starting a job shall be a tenth of it at most, however short the time asked for.
    """
    batch = facts.config.batch
    if batch.items != "auto":
        return batch.items
    rate = facts.memo.rate(f"{kind} {model}")
    if rate is None or not work:
        return _UNKNOWN_ITEMS
    seconds = max(batch.minutes * 60 - rate.starting, 9 * rate.starting)
    settings = facts.config.datasets.get(dataset, _PROMPTS), facts.config.models[model]
    targets = sum(len(item.targets) for item in work)
    all_ = rate.seconds(targets, amount_of(kind, *settings, work))
    return max(1, int(seconds * len(work) / all_)) if all_ else _UNKNOWN_ITEMS


def minutes_of(memo: Memo, order: WorkOrder, *, starts: bool = True) -> float | None:
    """Return the expected duration of an order, where past jobs of its kind and model tell.

    `starts` tells whether its job starts with it.
    """
    rate = memo.rate(order.work)
    if rate is None:
        return None
    starting = rate.starting if starts else 0.0
    return (starting + rate.seconds(len(order.paths), order_amount(order))) / 60


def work_item(source: Source, targets: Sequence[Target], content: str | None = None) -> WorkItem:
    """Return the item of a source and its targets; `content` is the source's digest, if known."""
    return WorkItem(
        source.stem,
        source.path,
        source.text,
        tuple(targets),
        source.controls,
        source.media,
        content,
        source.span,
        source.layers,
        source.control_sizes,
        source.image,
    )


def work_order(
    facts: Facts, dataset: str, model: str, kind: str, work: Sequence[WorkItem]
) -> WorkOrder:
    """Return the order for some work of one dataset, model and kind."""
    config = facts.config
    return WorkOrder(
        kind=kind,
        dataset=dataset,
        model=model,
        dataset_settings=config.datasets.get(dataset, _PROMPTS),
        model_settings=config.models[model],
        recipe=facts.recipe(dataset, model, kind),
        items=tuple(work),
        musubi_tuner=config.musubi_tuner if config.models[model].scripted else None,
        sd_scripts=config.sd_scripts if config.models[model].by_strategies else None,
    )
