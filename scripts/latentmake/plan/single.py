"""One cache file, asked for by its name: the order that makes just this."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator
from pathlib import Path

from pydantic import ValidationError

from latentmake.config.mistakes import nearest, refuse_unknown
from latentmake.config.runs import Run
from latentmake.errors import ConfigError, SourceError
from latentmake.index.memo import target_stat
from latentmake.layouts import Named, kind_of, text_of
from latentmake.plan.batches import work_item, work_order
from latentmake.plan.facts import Facts
from latentmake.plan.keys import Source, resolution_of
from latentmake.plan.orders import Target, WorkOrder
from latentmake.plan.parts import PROMPTS, known_prompts, prompt_sources, source_of, text_parts
from latentmake.plan.planner import evaluate
from latentmake.plan.run_checks import check_resolutions
from latentmake.plan.staleness import Evaluation


def single(facts: Facts, path: str) -> tuple[WorkOrder, bool]:
    """Plan one cache file, `cache/{dataset}/{model}/...`; return its order and whether it is stale.

    Raises:
        SourceError: its item is faulty, or its source cannot be read.
        UserError: there is no such item, or something makes planning impossible.
    """
    config = facts.config
    _, dataset, model, place, name = (*path.split("/", 4), "", "", "", "")[:5]
    refuse_unknown("dataset", dataset, (PROMPTS, *config.datasets), path)
    refuse_unknown("model", model, config.models, path)
    if dataset != PROMPTS and re.fullmatch(r"[0-9]+(x[0-9]+)?", place):
        _check_size(facts, dataset, model, place, path)
    layout = facts.layout(model)
    bases = layout.owners(name)
    for part, source, named in named_targets(facts, dataset, model, place, bases):
        if named.path == path:
            return _single(facts, dataset, model, part, source, named)
    for fault in () if dataset == PROMPTS else facts.known_faults(dataset, model):
        if layout.base(fault.stem) in bases:
            raise SourceError(fault.what, where=fault.path, hint=fault.hint)
    paths = (named.path for _, _, named in named_targets(facts, dataset, model, place))
    names = {each.split("/", 4)[4]: each for each in paths}
    hint = "check the name of its folder"
    if names:
        hint = f"the nearest is {names[nearest(name, names) or min(names)]}"
    raise ConfigError("no item has a cache file of this name", where=path, hint=hint)


def named_targets(
    facts: Facts, dataset: str, model: str, place: str, bases: Collection[str] | None = None
) -> Iterator[tuple[str, Source, Named]]:
    """Yield part, source and name of each target in a folder; of some bases alone, if given."""
    layout, settings = facts.layout(model), facts.config.datasets.get(dataset)
    for part in layout.parts([place]):
        folder = layout.folder(dataset, model, part)
        if folder != f"cache/{dataset}/{model}/{place}":
            continue
        for source in _sources(facts, dataset, model, part):
            if bases is None or layout.base(source.stem) in bases:
                media, span = source.media, source.span
                for named in layout.named(folder, part, source.stem, media, settings, span):
                    yield part, source, named


def _check_size(facts: Facts, dataset: str, model: str, place: str, path: str) -> None:
    """Refuse a resolution forbidden to runs of this dataset and model."""
    try:
        run = Run(datasets=[dataset], model=model, resolutions=[place], trainer=None)
        facts.config.check_run("NAME", run)
        check_resolutions(facts, "NAME", run)
    except ConfigError as error:
        raise ConfigError(error.what, where=path, hint=error.hint) from None
    except ValidationError as error:
        raise ConfigError(
            f"{place} is no resolution that can be encoded ({error.errors()[0]['msg']})",
            where=path,
            hint="use a resolution of a run",
        ) from None


def _sources(facts: Facts, dataset: str, model: str, part: str) -> list[Source]:
    if dataset == PROMPTS:
        return prompt_sources(known_prompts(facts.config, model)) if part == "text" else []
    if kind_of(part) == "text" and text_of(part) not in text_parts(facts.config.datasets[dataset]):
        return []
    controlled = facts.layout(model).controlled_text
    items = facts.items(dataset, model)[0]
    return [source_of(part, item, controlled_text=controlled) for item in items]


def evaluate_one(
    facts: Facts, dataset: str, model: str, part: str, source: Source, path: str
) -> Evaluation:
    """Return the state of the targets of one source, of which one lies at a path or is missing."""
    there = os.path.lexists(path) and not Path(path).is_dir()
    found = {path: target_stat(Path(path).lstat())} if there else {}
    sources, owned = {part: [source]}, {source.stem}
    return evaluate(facts, dataset, model, sources, owned=owned, found=found, gone=())


def _single(
    facts: Facts, dataset: str, model: str, part: str, source: Source, named: Named
) -> tuple[WorkOrder, bool]:
    kind, path = kind_of(part), named.path
    state = evaluate_one(facts, dataset, model, part, source, path)
    for error in state.unreadable.values():
        raise error
    stale = next((each for each in state.parts[part].stale if each.path == path), None)
    target = Target(
        part, path, stale.found if stale else None, resolution_of(part, source), named.clip
    )
    order = work_order(facts, dataset, model, kind, [work_item(source, [target])])
    order.write()
    return order, stale is not None
