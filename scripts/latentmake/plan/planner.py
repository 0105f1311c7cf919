"""Planner: stale targets of runs, and the orders of the jobs that make them.

Only the process that the user started plans. It imports no torch and opens no file of known stat.
"""

from __future__ import annotations

import contextlib
import gc
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from pydantic import ValidationError

import latentmake
from latentmake import digest
from latentmake.config.runs import Run
from latentmake.errors import ConfigError, SourceError, nearest, refuse_unknown
from latentmake.files import atomic
from latentmake.files.paths import is_remote
from latentmake.files.workspace import other_owner
from latentmake.index.listing import Folder, Listing
from latentmake.index.memo import Memo, target_stat
from latentmake.layouts import kind_of, text_of
from latentmake.models.run_checks import check_resolutions, check_run
from latentmake.plan import remembered
from latentmake.plan.contents import unreadable
from latentmake.plan.facts import Facts
from latentmake.plan.lock import images_digest, place_of
from latentmake.plan.orders import Order, Work, jobs_of
from latentmake.plan.receipts import learn_receipts
from latentmake.plan.run_plan import Plan, RunPlan, plan_manifest
from latentmake.plan.state import PartState, State
from latentmake.plan.target import (
    PROMPTS,
    Part,
    Target,
    generation_prompts,
    parts_of,
    prompt_items,
    prompts_of,
    targets_of,
    text_parts,
)
from latentmake.sources.item import Item

_Needed = Mapping[tuple[str, str], Mapping[str, set[str]]]
"""(dataset, model) -> part -> the runs that need it."""

_SIZE = re.compile(r"[0-9]+(x[0-9]+)?")


def make_plan(
    facts: Facts,
    names: Iterable[str],
    *,
    force: bool = False,
    generated: Collection[str] = (),
    side_by_side: int | None = 1,
    dry: bool = False,
) -> Plan:
    """Plan some runs, and write the orders of batches and manifests that have work to do.

    Args:
        facts: of the configuration.
        names: of the runs.
        force: whether manifests have work to do in any case.
        generated: runs whose clips are asked for, so that the prompts of these are encoded.
        side_by_side: how many jobs run at a time on this machine; None on a cluster.
        dry: whether no job will read the orders of manifests, which then list no items.

    Raises:
        ConfigError: another project, whose items differ, uses the same cache folder.
    """
    runs = {name: facts.config.runs[name] for name in names}
    learn_receipts(facts.memo)
    needed: dict[tuple[str, str], dict[str, set[str]]] = {}
    parts = {
        name: parts_of(facts.config, run, generated=name in generated) for name, run in runs.items()
    }
    for name, run in runs.items():
        check_run(facts.config, name, run)
        for part in parts[name]:
            asked = needed.setdefault((part.dataset, part.model), {})
            asked.setdefault(part.name, set()).add(name)
    states = _judge_all(facts, runs, needed, generated)
    for (dataset, _), found in states.items():
        _refuse_other_items(dataset, found.parts.values())
    if any(part.stale for found in states.values() for part in found.parts.values()):
        from latentmake.plan.reusable import mark_reusable

        mark_reusable(facts.memo, states.values())
    plans = {
        name: RunPlan(
            name,
            parts={
                Part(dataset, run.model, part): each
                for dataset in dict.fromkeys(part.dataset for part in parts[name])
                for part, each in states[dataset, run.model].parts.items()
                if name in needed[dataset, run.model].get(part, {name})
            },
            images={dataset: states[dataset, run.model].images for dataset in run.datasets},
        )
        for name, run in runs.items()
    }
    wanted = []
    for (dataset, model), asked in needed.items():
        found, jobs = states[dataset, model], side_by_side or 1
        if not any(each.stale for each in found.parts.values()):
            continue
        from latentmake.plan.batches import batches

        for order, wanting in batches(facts, dataset, model, asked, found, side_by_side=jobs):
            if not facts.asks:
                order.write()
            wanted.append((order, wanting))
            for name in wanting:
                plans[name].orders.append(order)
    for name, plan in plans.items():
        plan_manifest(facts, plan, runs[name], force=force, dry=dry)
    return Plan(plans, jobs_of(wanted, side_by_side))


@contextlib.contextmanager
def many_objects() -> Iterator[None]:
    """Make a plan without looking for garbage.

    Plan and graph are millions of small objects that live to the end: looking through them again
    and again would cost more than making them.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.set_threshold(200_000, 20, 100)
        gc.enable()


def _refuse_other_items(dataset: str, parts: Iterable[PartState]) -> None:
    """Refuse to work on another project's caches, unless both have the same items.

    Prompts are named by their content: those of the other project stay.

    Raises:
        ConfigError: this build would remove or replace some of them, or the other's would do so.
    """
    touched = [part for part in parts if part.orphans or part.stale]
    project = other_owner(dataset) if touched else None
    if project is None:
        return
    count = 0
    for part in touched:
        whole = {each for each in part.orphans if not each.endswith(atomic.TEMPORARY_SUFFIX)}
        # The other project may be writing the half ones just now.
        part.orphans = sorted(whole) if dataset != PROMPTS else []
        replaced = [each for each in part.stale if each.target.found is not None or part.fresh > 0]
        count += len(part.orphans) + sum(each.reason != "damaged" for each in replaced)
    if count and dataset != PROMPTS:
        raise ConfigError(
            f"the project {project} uses this folder too, and its items are not those of "
            f"{Path.cwd()}: {count} cache files differ",
            where=f"cache/{dataset}",
            hint="rename the dataset in one of them (equal files are linked), make `cache` a "
            "folder of this project, or build there first if the items are meant to be the same",
        )


# -- state of datasets ----------------------------------------------------------------------------


def _judge_all(
    facts: Facts, runs: Mapping[str, Run], needed: _Needed, generated: Collection[str]
) -> dict[tuple[str, str], State]:
    states: dict[tuple[str, str], State] = {}
    pending = list(needed)
    while pending:
        dataset, model = pending.pop(0)
        if dataset == PROMPTS:
            using = {name: run for name, run in runs.items() if run.model == model}
            texts = {text for run in using.values() for text in prompts_of(run)}
            for name in using.keys() & {*generated}:
                texts |= {*generation_prompts(facts.config, using[name])}
            states[dataset, model] = _judge_prompts(facts, model, texts)
            continue
        found = _judge_dataset(facts, dataset, model, [*needed[dataset, model]])
        states[dataset, model] = found
        if found.unreadable:  # by every model: those judged before must be again
            facts.add_faults(dataset, found.unreadable)
            again = [each for each in states if each[0] == dataset]
            pending += [each for each in again if each not in pending]
    return states


def _judge_prompts(facts: Facts, model: str, texts: Iterable[str]) -> State:
    """Return the state of some prompts of one model; those of all its runs have an owner."""
    owned = {item.stem for item in facts.wanted_items(PROMPTS, model)}
    found = Folder(f"cache/{PROMPTS}/{model}").listing()
    return facts.judge(PROMPTS, model, ["text"]).judge({"text": prompt_items(texts)}, owned, found)


def _judge_dataset(facts: Facts, dataset: str, model: str, parts: Sequence[str]) -> State:
    """Return the state of some parts; of what is remembered, only what changed is judged."""
    asked = _asked(facts, dataset, model, parts)
    settings, layout = facts.config.datasets[dataset], facts.layout(model)

    def judge(
        items: Sequence[Item],
        owned: Collection[str],
        found: Listing,
        gone: Collection[str] | None = None,
    ) -> State:
        latents = facts.inputs(model, "latents", items)  # the same at each resolution
        inputs = {
            part: latents if kind_of(part) == "latents" else facts.inputs(model, part, items)
            for part in parts
        }
        some = None if gone is None else (items, [*found, *gone])
        made = facts.judge(dataset, model, parts, some).judge(inputs, owned, found)
        if not any(kind_of(part) == "text" for part in parts):  # the trainer encodes it
            made.unreadable |= _unreadable_captions(facts.memo, items)
        return made

    usual = not facts.skipped(dataset) and dataset not in facts.unreadable
    if usual and (past := remembered.recall(facts.memo, asked)):
        if same := past.state(asked):
            return same
        facts.note_unused(dataset)
        if changed := remembered.judge_changed(facts, asked, past, judge):
            remembered.keep(facts.memo, asked, changed[1], changed[0])
            return changed[0]
    elif usual:
        facts.note_unused(dataset)
    items, faults = facts.items(dataset, model)
    wanted = facts.wanted_items(dataset, model)
    owned = {item.stem for item in items} | {fault.stem for fault in faults}
    if layout.drops_skipped and settings.on_error == "skip":
        owned = {item.stem for item in wanted}
    made = judge(wanted, owned, asked.folder.listing())
    places = {item.stem: place_of(item, layout) for item in wanted}
    made.images = images_digest(places.values())
    if not faults and usual:
        remembered.keep(facts.memo, asked, places, made)
    return made


def _asked(facts: Facts, dataset: str, model: str, parts: Sequence[str]) -> remembered.Asked:
    """Return the question for the state of some parts, with all that the answer depends on."""
    settings = facts.config.datasets[dataset]
    recipes = {part: facts.recipe_digest(dataset, model, kind_of(part)) for part in parts}
    control = facts.control(dataset)
    listings = [control and control.fingerprint]
    version = [latentmake.__version__, latentmake.PLAN_VERSION]
    layout = facts.layout(model).name
    base = [version, dataset, model, layout, recipes, listings, settings.model_dump()]
    folder = Folder(f"cache/{dataset}/{model}")
    scan = facts.scan(dataset)
    return remembered.Asked(dataset, model, tuple(parts), digest.of_value(base), scan, folder)


def _unreadable_captions(memo: Memo, items: Iterable[Item]) -> dict[str, SourceError]:
    """Return stem -> fault of the captions in files that cannot be read."""
    found: dict[str, SourceError] = {}
    for item in items:
        if item.caption is not None and not is_remote(item.caption):
            try:
                memo.digest_of_file(Path(item.caption))
            except OSError as error:
                found[item.stem] = unreadable(item.caption, error)
    return found


# -- one cache file -------------------------------------------------------------------------------


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
            check_resolutions(config, "NAME", run)
        except ConfigError as error:
            raise ConfigError(error.what, where=path, hint=error.hint) from None
        except ValidationError as error:
            what, hint = error.errors()[0]["msg"], "use a resolution of a run"
            raise ConfigError(what, where=path, hint=hint) from None
    layout = facts.layout(model)
    bases = layout.owners(name)
    for item, target in named_targets(facts, dataset, model, place, bases):
        if target.path == path:
            return _single(facts, dataset, model, item, target)
    for fault in () if dataset == PROMPTS else facts.known_faults(dataset, model):
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
        wanted, is_text = Part(dataset, model, part), kind_of(part) == "text"
        if layout.folder(*wanted) != f"cache/{dataset}/{model}/{place}":
            continue
        if settings is None:
            inputs = facts.wanted_items(dataset, model) if part == "text" else []
        elif not (text_of(part) in text_parts(settings) if is_text else _SIZE.fullmatch(part)):
            continue
        else:
            inputs = facts.inputs(model, part, facts.items(dataset, model)[0])
        if bases is not None:
            inputs = [item for item in inputs if layout.base(item.stem) in bases]
        for item, targets in targets_of(layout, settings, wanted, inputs):
            for target in targets:
                yield item, target


def judge_one(facts: Facts, dataset: str, model: str, item: Item, target: Target) -> State:
    """Return the state of a part with one target."""
    there = os.path.lexists(target.path) and not Path(target.path).is_dir()
    found = {target.path: target_stat(Path(target.path).lstat())} if there else {}
    judge = facts.judge(dataset, model, [target.part], ([item], [target.path]))
    return judge.judge({target.part: [item]}, {item.stem}, found)


def _single(
    facts: Facts, dataset: str, model: str, item: Item, target: Target
) -> tuple[Order, bool]:
    from latentmake.plan.batches import order_of

    found = judge_one(facts, dataset, model, item, target)
    for error in found.unreadable.values():
        raise error
    all_stale = found.parts[target.part].stale
    stale = next((each for each in all_stale if each.path == target.path), None)
    work = Work(item, (target if stale is None else stale.target,))
    order = order_of(facts, dataset, model, kind_of(target.part), [work])
    order.write()
    return order, stale is not None
