"""Batches: cut the stale targets of a dataset and model into orders, and deal orders to jobs.

Cache files that a command line names are handled in the same way.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from pydantic import ValidationError

from latentmake.base.digest import target_stat
from latentmake.base.errors import ConfigError, SourceError, refuse_unknown
from latentmake.config.datasets import Dataset
from latentmake.config.root import Run
from latentmake.data.item import Item
from latentmake.layouts.layout import CAPTIONS, kind_of
from latentmake.models.inspection import check_run
from latentmake.plan.estimates import batch_items
from latentmake.plan.facts import Facts
from latentmake.plan.judge import Judge, State
from latentmake.plan.orders import (
    NO_MODEL,
    PROMPTS,
    EncodingJob,
    Order,
    Part,
    Target,
    Work,
    targets_of,
    text_parts,
)

_REUSED_ITEMS = 16_384  # items of a batch whose files are only linked
_SHARED_ITEMS = 64  # fewest items of a batch that is split across GPUs
_PROMPTS = Dataset(path=".", empty_caption="allow")  # users may mean an empty prompt


def batches(
    facts: Facts,
    dataset: str,
    model: str,
    needs: Mapping[str, set[str]],
    stale: Mapping[str, Sequence[Work]],
    side_by_side: int,
    *,
    may_skip: bool = True,
) -> Iterator[tuple[Order, frozenset[str]]]:
    """Cut the stale targets of a dataset and model into orders, each with the runs that need it.

    An order has targets of one kind, which the same runs need. It either encodes them, encodes
    them by force or only links files. All such targets of an item are in one order.

    `needs` names the runs that need each part, `stale` has its stale targets. `side_by_side` is the
    number of jobs that run at a time on this machine. Without `may_skip`, jobs fail at a faulty
    item instead of skipping it.
    """
    alike: dict[tuple[str, frozenset[str], str], list[str]] = {}
    config, anew = facts.config, facts.forced_of(dataset, model)
    settings = config.models.get(model, NO_MODEL)
    data = config.datasets.get(dataset, _PROMPTS)
    if not may_skip:
        data = data.model_copy(update={"on_error": "fail"})
    everyone = frozenset().union(*(runs for part, runs in needs.items() if "@" in part))
    for part, wanting in needs.items():
        # A text that is stored once per resolution is encoded once for all of them.
        runs = everyone if "@" in part else frozenset(wanting)
        maker = Part(dataset, model, part).maker
        alike.setdefault((kind_of(part), runs, maker), []).append(part)
    for (kind, runs, maker), parts in alike.items():
        # (can be linked, is forced) -> stem and text of an item -> its work in all parts
        groups: dict[tuple[bool, bool], dict[tuple[str, str | None], Work]] = {}
        for part, work in ((name, work) for name in parts for work in stale[name]):
            item, text = work.item, None
            if kind == "text":  # each variant that a captioner must make is a text of its own
                text = part.partition("@")[0] if item.awaits_caption else item.text
            for target in work.targets:
                is_forced = bool(anew) and not anew.isdisjoint((part, target.path))
                group = groups.setdefault((bool(target.at_hand), is_forced), {})
                first, targets, content = group.get((item.stem, text), (item, (), None))
                group[item.stem, text] = Work(first, (*targets, target), content or work.content)
        for (linked, forced), group in groups.items():
            works = [*group.values()]
            group.clear()  # frees memory: a plan may have very many items
            size = _REUSED_ITEMS
            if not linked and config.batch.items != "auto":
                size = config.batch.items
            elif not linked:
                number = sum(len(work.targets) for work in works) / len(works)
                size = batch_items(facts.memo, f"{kind} {maker}", config.batch.minutes, number)
            if side_by_side > 1 and not linked:
                size = min(size, max(_SHARED_ITEMS, -(-len(works) // side_by_side)))
            external = config.program(settings.encoder)
            for start in range(0, len(works), size):
                yield (
                    Order(
                        kind=kind,
                        dataset=dataset,
                        model=maker,
                        dataset_settings=data,
                        model_settings=settings,
                        recipe=facts.recipe(dataset, maker, kind),
                        items=tuple(works[start : start + size]),
                        musubi_tuner=config.musubi_tuner if settings.scripted else None,
                        sd_scripts=None if settings.scripted else external,
                        forced=forced,
                    ),
                    runs,
                )


def jobs_of(
    wanted: Iterable[tuple[Order, Collection[str]]], side_by_side: int | None
) -> list[EncodingJob]:
    """Group orders into jobs.

    Orders of one job have the same kind and model, and the same runs need them. So no run waits for
    files that only other runs need. An order gets a job of its own if an external program encodes
    it, because that program starts for each order, and on a cluster, where `side_by_side` is None.
    """
    groups: dict[object, list[Order]] = {}
    for order, runs in wanted:
        # Everything that a loaded encoder depends on: orders with equal values can share one.
        encoder = order.work, order.kind == "latents" and order.dataset_settings.flip_aug
        flags = order.reuses, order.forced, order.awaits
        group: tuple[object, ...] = (encoder, *flags, frozenset(runs))
        if side_by_side is None or order.is_external:
            group = (id(order),)
        groups.setdefault(group, []).append(order)
    return [job for orders in groups.values() for job in _dealt(orders, side_by_side or 1)]


def _dealt(orders: Sequence[Order], number: int) -> Iterator[EncodingJob]:
    """Deal orders to at most `number` jobs, so that jobs have about equally many targets.

    A job begins with the order of the largest samples, which decides how much memory it needs.
    """

    def largest(order: Order) -> int:
        return max((target.pixels for target in order.targets), default=0)

    jobs: list[list[Order]] = [[] for _ in range(min(number, len(orders)))]
    targets = [0] * len(jobs)
    for order in sorted(orders, key=lambda order: -len(order.paths)):
        least = targets.index(min(targets))
        jobs[least].append(order)
        targets[least] += len(order.paths)
    for job in jobs:
        yield EncodingJob(tuple(sorted(job, key=largest, reverse=True)))


# -- cache files by their names -------------------------------------------------------------------

_SIZE = re.compile(r"[0-9]+(x[0-9]+)?")


def named_states(
    facts: Facts, paths: Iterable[str]
) -> Iterator[tuple[Part, tuple[Collection[str], State]]]:
    """Judge cache files that a command names, `cache/{dataset}/{model}/...`.

    Yields:
        A part, its named files and their state. Runs need not have this part.

    Raises:
        SourceError: an item is faulty, or its source cannot be read.
        UserError: there is no such item, or something makes planning impossible.
    """
    folders: dict[tuple[str, str, str], set[str]] = {}
    for path in paths:
        names = [*path.split("/", 4), "", "", ""]
        dataset, model, place = names[1:4]
        refuse_unknown("dataset", dataset, (PROMPTS, *facts.config.datasets), path)
        if model == CAPTIONS:
            refuse_unknown("captioner", place, facts.config.datasets[dataset].captioner, path)
        else:
            refuse_unknown("model", model, facts.config.models, path)
        folders.setdefault((dataset, model, place), set()).add(path)
    for (dataset, model, place), named in folders.items():
        if dataset != PROMPTS and _SIZE.fullmatch(place):
            _check_size(facts, dataset, model, place, min(named))
        layout = facts.layout(model)
        below = len(f"cache/{dataset}/{model}/{place}/")
        bases = {path: layout.owners(path[below:]) for path in named}
        every = {base for several in bases.values() for base in several}
        items_of: dict[str, dict[str, Item]] = {}
        for item, target in named_targets(facts, dataset, model, place, every):
            # Each path counts once: two parts may share one folder.
            if bases.pop(target.path, None) is not None:
                items_of.setdefault(target.part, {})[item.stem] = item
        for path, owners in sorted(bases.items()):
            for fault in facts.faults.get((dataset, model), ()):
                if layout.base(fault.stem) in owners:
                    raise SourceError(fault.what, where=fault.path, hint=fault.hint)
            hint = "check the names of folder and item"
            raise ConfigError("no item has a cache file of this name", where=path, hint=hint)
        for part, items in items_of.items():
            if kind_of(part) in facts.forced:
                facts.forced |= named
            state = judged(facts, Part(dataset, model, part), [*items.values()], named)
            works = (work.only(named) for work in state.parts[part].stale)
            state.parts[part].stale = [work for work in works if work.targets]
            yield Part(dataset, model, part), (named, state)


def named_and_awaited(
    facts: Facts, paths: Collection[str]
) -> dict[Part, tuple[Collection[str], State]]:
    """Judge named cache files as `named_states` does, and the made captions that they wait for.

    The parts of captions come first.
    """
    named = dict(named_states(facts, sorted(paths)))
    parts = (part for _, state in named.values() for part in state.parts.values())
    items = [work.item for part in parts for work in part.stale if work.item.awaits_caption]
    captions = {made.path for item in items for made in item.made}
    if captions.difference(paths):
        named = dict(named_states(facts, sorted(captions.union(paths))))
    return dict(sorted(named.items(), key=lambda entry: entry[0].model != CAPTIONS))


def _check_size(facts: Facts, dataset: str, model: str, place: str, path: str) -> None:
    """Raise ConfigError for a resolution that no run of the dataset and model can have."""
    try:
        run = Run.model_validate({"datasets": dataset, "model": model, "resolutions": place})
        facts.config.check(path, run)
        check_run(facts.config, path, run, facts.memo.remembered)
    except ConfigError as error:
        raise ConfigError(error.what, where=path, hint=error.hint) from None
    except ValidationError as error:
        what = f"there is no such resolution ({error.errors()[0]['msg']})"
        raise ConfigError(what, where=path) from None
    if (name := run.resolutions[0].name) != place:
        raise ConfigError("is no name of a resolution", where=path, hint=f"write `{name}`")


def named_batches(
    facts: Facts,
    named: Mapping[Part, tuple[Collection[str], State]],
    others: Iterable[State],
    side_by_side: int,
) -> Iterator[tuple[Order, frozenset[str]]]:
    """Cut stale files that a command names into orders, as `batches` does.

    `others` are the states of runs. Their stale targets are left out, because they have orders
    already. A job that makes a named file fails at a faulty item, even if its dataset skips faulty
    items.
    """
    parts = [part for state in others for part in state.parts.values()] if named else []
    planned = {target.path for part in parts for target in part.to_make}
    places: dict[tuple[str, str], dict[str, list[Work]]] = {}
    for (dataset, model, name), (_, state) in named.items():
        part = state.parts[name]
        paths = {target.path for target in part.to_make} - planned
        places.setdefault((dataset, model), {})[name] = [work.only(paths) for work in part.stale]
    for place, stale in places.items():
        unneeded = {part: set[str]() for part in stale}
        yield from batches(facts, *place, unneeded, stale, side_by_side, may_skip=False)


def named_targets(
    facts: Facts, dataset: str, model: str, place: str, bases: Collection[str]
) -> Iterator[tuple[Item, Target]]:
    """Yield inputs and target of each cache file in a folder that has one of these bases."""
    layout, settings = facts.layout(model), facts.config.datasets.get(dataset)
    for part in layout.parts([place]):
        wanted = Part(dataset, model, part)
        if layout.folder(*wanted) != f"cache/{dataset}/{model}/{place}":
            continue
        if settings is None:
            inputs = facts.wanted_items(dataset, model) if part == "text" else []
        elif not (
            model == CAPTIONS
            or _SIZE.fullmatch(part)
            or part.partition("@")[0] in text_parts(settings)
        ):
            continue
        else:
            items = facts.items(dataset, model)[0]
            inputs = [item.inputs(part, layout) for item in items]
        inputs = [item for item in inputs if layout.base(item.stem) in bases]
        for item, targets in targets_of(layout, settings, wanted, inputs):
            yield from ((item, target) for target in targets)


def judged(facts: Facts, part: Part, items: Sequence[Item], paths: Collection[str]) -> State:
    """Return the state of some inputs of a part; `paths` are their cache files, which may exist.

    Raises:
        SourceError: a source cannot be read.
    """
    present = (path for path in paths if os.path.lexists(path) and not Path(path).is_dir())
    stats = {path: target_stat(Path(path).lstat()) for path in present}
    judge = Judge(facts, part.dataset, part.model, [part.name], items, paths)
    state = judge.judge({part.name: items}, {item.stem for item in items}, stats)
    for fault in state.unreadable.values():
        raise SourceError(fault.what, where=fault.path, hint=fault.hint)
    return state
