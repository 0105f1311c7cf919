"""Batches: the stale targets of a dataset and model, cut into orders, and these dealt to jobs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from latentmake.config.datasets import Dataset
from latentmake.layouts.layout import parsed
from latentmake.plan.facts import Facts
from latentmake.plan.orders import EncodingJob, Order, Work, job_of
from latentmake.plan.state import State

_REUSED_ITEMS = 16_384  # of a batch that encodes nothing
_SHARED_ITEMS = 64  # of a batch, at the least, that is one so that several GPUs work
_PROMPTS = Dataset(path=".", empty_caption="allow")  # an empty prompt is meant


def batches(
    facts: Facts,
    dataset: str,
    model: str,
    asked: Mapping[str, set[str]],
    states: State,
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
    alike: dict[tuple[str, frozenset[str]], list[str]] = {}
    everyone = frozenset().union(*(runs for part, runs in asked.items() if "@" in part))
    for part, wanting in asked.items():
        # A text that lies beside each resolution is encoded once for all of them.
        runs = everyone if "@" in part else frozenset(wanting)
        alike.setdefault((parsed(part).kind, runs), []).append(part)
    for (kind, runs), parts in alike.items():
        # Whether all is at hand -> of an item: itself, the digest of its inputs where that is
        # known, and its stale targets.
        groups: dict[bool, dict[tuple[str, str | None], list[Any]]] = {}
        for item, target, _, content, _ in (x for part in parts for x in states.parts[part].stale):
            group = groups.setdefault(bool(target.at_hand), {})
            found = group.setdefault((item.stem, item.text), [item, content])
            found[1] = found[1] or content
            found.append(target)
        for at_hand, group in groups.items():
            works = [Work(item, (*targets,), content) for item, content, *targets in group.values()]
            group.clear()
            size = _REUSED_ITEMS if at_hand else _batch_size(facts, model, kind, works)
            if side_by_side > 1 and not at_hand:
                size = min(size, max(_SHARED_ITEMS, -(-len(works) // side_by_side)))
            for start in range(0, len(works), size):
                yield order_of(facts, dataset, model, kind, works[start : start + size]), runs


def _batch_size(facts: Facts, model: str, kind: str, works: Sequence[Work]) -> int:
    """Return the number of items of a batch: as configured, or by the speed of past jobs."""
    from latentmake.plan.receipts import batch_items

    batch = facts.config.batch
    if batch.items != "auto":
        return batch.items
    targets = sum(len(each.targets) for each in works) / len(works)
    return batch_items(facts.memo, f"{kind} {model}", batch.minutes, targets)


def order_of(facts: Facts, dataset: str, model: str, kind: str, works: Sequence[Work]) -> Order:
    """Return the order for some work of one dataset, model and kind."""
    config, settings = facts.config, facts.config.models[model]
    return Order(
        kind=kind,
        dataset=dataset,
        model=model,
        dataset_settings=config.datasets.get(dataset, _PROMPTS),
        model_settings=settings,
        recipe=facts.recipe(dataset, model, kind),
        items=tuple(works),
        musubi_tuner=config.musubi_tuner if settings.scripted else None,
        sd_scripts=None if settings.scripted else config.encoding_program(settings),
    )


def jobs_of(
    wanted: Iterable[tuple[Order, Collection[str]]], side_by_side: int | None
) -> list[EncodingJob]:
    """Group orders into jobs.

    Orders of a job are of one kind and model, and needed by the same runs, so that no run waits for
    what only others need. Those of an external encoder, which starts for each order, stay alone.

    Args:
        wanted: orders, each with the runs that need it.
        side_by_side: how many jobs run at a time on this machine; None on a cluster, where each
            order is a job.
    """
    groups: dict[object, list[Order]] = {}
    for order, runs in wanted:
        # All that a loaded encoder depends on: orders with the same can share one.
        encoder = order.work, order.kind == "latents" and order.dataset_settings.flip_aug
        alone = side_by_side is None or order.is_external
        group = (order.name,) if alone else (encoder, order.reuses, frozenset(runs))
        groups.setdefault(group, []).append(order)
    return [
        job_of(dealt) for orders in groups.values() for dealt in _dealt(orders, side_by_side or 1)
    ]


def _dealt(orders: Sequence[Order], number: int) -> Iterator[list[Order]]:
    """Deal orders to a number of jobs that have about as many targets each.

    In a job the order of the largest samples comes first: it decides how much memory is needed.
    """
    jobs: list[list[Order]] = [[] for _ in range(min(number, len(orders)))]
    targets = [0] * len(jobs)
    for order in sorted(orders, key=lambda each: -len(each.paths)):
        least = targets.index(min(targets))
        jobs[least].append(order)
        targets[least] += len(order.paths)
    for job in jobs:
        yield sorted(job, key=_largest, reverse=True)


def _largest(order: Order) -> int:
    """Return the pixels of an order's largest target; of a clip those of all frames."""
    targets = (target for item in order.items for target in item.targets)
    sizes = ((each.size, each.clip.frames if each.clip else 1) for each in targets)
    return max((size.width * size.height * frames for size, frames in sizes if size), default=0)
