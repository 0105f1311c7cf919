"""One cache file: its order, where a command line asks for it by its name, and its state."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator
from pathlib import Path

from pydantic import ValidationError

from latentmake.config.root import Run
from latentmake.data.item import Item
from latentmake.errors import ConfigError, SourceError, nearest, refuse_unknown
from latentmake.index.memo import target_stat
from latentmake.layouts.layout import parsed
from latentmake.models.checks import check_run
from latentmake.plan.batches import order_of
from latentmake.plan.facts import Facts
from latentmake.plan.orders import Order, Work
from latentmake.plan.state import State
from latentmake.plan.target import PROMPTS, Part, Target, targets_of, text_parts

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
    if dataset != PROMPTS and _SIZE.fullmatch(place):
        try:
            run = Run(datasets=[dataset], model=model, resolutions=[place], trainer=None)
            config.check_run("NAME", run)
            check_run(config, "NAME", run)
        except ConfigError as error:
            raise ConfigError(error.what, where=path, hint=error.hint) from None
        except ValidationError as error:
            what, hint = error.errors()[0]["msg"], "use a resolution of a run"
            raise ConfigError(what, where=path, hint=hint) from None
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
    paths = (target.path for _, target in named_targets(facts, dataset, model, place))
    names = {each.split("/", 4)[4]: each for each in paths}
    hint = "check the name of its folder"
    if names:
        hint = f"the nearest is {names[nearest(name, names) or min(names)]}"
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
    judge = facts.judge(dataset, model, [target.part], ([item], [target.path]))
    state = judge.judge({target.part: [item]}, {item.stem}, found)
    for error in state.unreadable.values():
        raise error
    return state
