"""Batches: the stale targets of a dataset and model, cut into orders, and these dealt to jobs.

A single cache file has an order of its own, where a command line asks for it by its name.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from latentmake.config.datasets import Dataset
from latentmake.data.item import Item
from latentmake.digest import target_stat
from latentmake.errors import ConfigError, SourceError, refuse_unknown
from latentmake.layouts.layout import parsed
from latentmake.plan.facts import Facts
from latentmake.plan.orders import (
    PROMPTS,
    EncodingJob,
    Order,
    Part,
    Target,
    Work,
    job_of,
    targets_of,
    text_parts,
)
from latentmake.plan.receipts import batch_items
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
    to be encoded or all that are at hand. `asked` has the runs that need each part, `side_by_side`
    is how many jobs run at a time on this machine.
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
    what only others need. Those of an external encoder, which starts for each order, stay alone, as
    does each order on a cluster, where `side_by_side` is None.
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


# -- a single cache file --------------------------------------------------------------------------

_SIZE = re.compile(r"[0-9]+(x[0-9]+)?")


def single(facts: Facts, path: str) -> tuple[Order, bool]:
    """Plan one cache file, `cache/{dataset}/{model}/...`; return its order and whether it is stale.

    Raises:
        SourceError: its item is faulty, or its source cannot be read.
        UserError: there is no such item, or something makes planning impossible.
    """
    config = facts.config
    _, dataset, model, place, name = (*path.split("/", 4), "", "", "", "")[:5]
    refuse_unknown("dataset", dataset, (PROMPTS, *config.datasets), path)
    refuse_unknown("model", model, config.models, path)
    runs = [run for run in config.runs.values() if run.model == model and dataset in run.datasets]
    asked = {size.name for run in runs for size in run.resolutions}
    if dataset != PROMPTS and _SIZE.fullmatch(place) and place not in asked:
        raise ConfigError("no run has this resolution", where=path, hint="use that of a run")
    layout = facts.layout(model)
    bases = layout.owners(name)
    for item, target in named_targets(facts, dataset, model, place, bases):
        if target.path == path:
            stale = judge_one(facts, dataset, model, item, target).stale(path)
            work = Work(item, (target if stale is None else stale.target,))
            order = order_of(facts, dataset, model, parsed(target.part).kind, [work])
            order.write()
            return order, stale is not None
    for fault in facts.faults.get((dataset, model), ()):
        if layout.base(fault.stem) in bases:
            raise SourceError(fault.what, where=fault.path, hint=fault.hint)
    hint = "check the names of folder and item"
    raise ConfigError("no item has a cache file of this name", where=path, hint=hint)


def named_targets(
    facts: Facts, dataset: str, model: str, place: str, bases: Collection[str] | None = None
) -> Iterator[tuple[Item, Target]]:
    """Yield inputs and target of each cache file in a folder; of some bases only, if given."""
    layout, settings = facts.layout(model), facts.config.datasets.get(dataset)
    for part in layout.parts([place]):
        wanted, is_text = Part(dataset, model, part), parsed(part).kind == "text"
        if layout.folder(*wanted) != f"cache/{dataset}/{model}/{place}":
            continue
        if settings is None:
            inputs = facts.wanted_items(dataset, model) if part == "text" else []
        elif not (parsed(part).text in text_parts(settings) if is_text else _SIZE.fullmatch(part)):
            continue
        else:
            inputs = [x.inputs(part, layout) for x in facts.items(dataset, model)[0]]
        if bases is not None:
            inputs = [item for item in inputs if layout.base(item.stem) in bases]
        for item, targets in targets_of(layout, settings, wanted, inputs):
            for target in targets:
                yield item, target


def judge_one(facts: Facts, dataset: str, model: str, item: Item, target: Target) -> State:
    """Return the state of a part with one target.

    Raises:
        SourceError: its source cannot be read.
    """
    there = os.path.lexists(target.path) and not Path(target.path).is_dir()
    found = {target.path: target_stat(Path(target.path).lstat())} if there else {}
    judge = facts.judge(dataset, model, [target.part], [item], [target.path])
    state = judge.judge({target.part: [item]}, {item.stem}, found)
    for fault in state.unreadable.values():
        raise SourceError(fault.what, where=fault.path, hint=fault.hint)
    return state
