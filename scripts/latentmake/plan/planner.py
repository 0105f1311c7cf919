"""Planner: stale targets of runs, and the orders of the jobs that make them.

Only the process that the user started plans. It imports no torch and opens no file of known stat.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import latentmake
from latentmake import digest
from latentmake.config.runs import Run
from latentmake.errors import SourceError
from latentmake.index.memo import Memo
from latentmake.layouts import kind_of
from latentmake.plan import changes, manifest, owners, reuse, snapshots, staleness
from latentmake.plan.batches import batches
from latentmake.plan.facts import Facts
from latentmake.plan.jobs import jobs_of
from latentmake.plan.keys import UNKNOWN, Source, unreadable
from latentmake.plan.listing import Folder, Listing
from latentmake.plan.manifest_job import plan_manifest
from latentmake.plan.parts import (
    PROMPTS,
    Part,
    Plan,
    RunPlan,
    generation_prompts,
    known_prompts,
    parts_of,
    prompt_sources,
    prompts_of,
    source_of,
)
from latentmake.plan.receipts import learn_receipts
from latentmake.plan.run_checks import check_run
from latentmake.plan.snapshots import Asked
from latentmake.plan.staleness import Evaluation
from latentmake.sources import metadata, s3
from latentmake.sources.items import Item

_Needed = Mapping[tuple[str, str], Mapping[str, set[str]]]
"""(dataset, model) -> part -> the runs that need it."""


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
        check_run(facts, name, run)
        for part in parts[name]:
            asked = needed.setdefault((part.dataset, part.model), {})
            asked.setdefault(part.name, set()).add(name)
    states = _evaluate_all(facts, runs, needed, generated)
    for (dataset, _), state in states.items():
        owners.refuse_other_items(dataset, state.parts.values())
    reuse.mark(facts.memo, [*states.values()])
    plans = {
        name: RunPlan(
            name,
            parts={
                Part(dataset, run.model, part): state
                for dataset in dict.fromkeys(part.dataset for part in parts[name])
                for part, state in states[dataset, run.model].parts.items()
                if name in needed[dataset, run.model].get(part, {name})
            },
            images={dataset: states[dataset, run.model].images for dataset in run.datasets},
        )
        for name, run in runs.items()
    }
    wanted = []
    for (dataset, model), asked in needed.items():
        state, jobs = states[dataset, model], side_by_side or 1
        for order, wanting in batches(facts, dataset, model, asked, state, side_by_side=jobs):
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


def _evaluate_all(
    facts: Facts, runs: Mapping[str, Run], needed: _Needed, generated: Collection[str]
) -> dict[tuple[str, str], Evaluation]:
    states: dict[tuple[str, str], Evaluation] = {}
    pending = list(needed)
    while pending:
        dataset, model = pending.pop(0)
        if dataset == PROMPTS:
            using = {name: run for name, run in runs.items() if run.model == model}
            texts = {text for run in using.values() for text in prompts_of(run)}
            for name in using.keys() & {*generated}:
                texts |= {*generation_prompts(facts.config, using[name])}
            states[dataset, model] = _evaluate_prompts(facts, model, texts)
            continue
        state = _evaluate_dataset(facts, dataset, model, [*needed[dataset, model]])
        states[dataset, model] = state
        if state.unreadable:  # by every model: those evaluated before must be again
            facts.add_faults(dataset, state.unreadable)
            again = [each for each in states if each[0] == dataset]
            pending += [each for each in again if each not in pending]
    return states


def evaluate(
    facts: Facts,
    dataset: str,
    model: str,
    sources: Mapping[str, Sequence[Source]],
    *,
    owned: set[str],
    found: Listing,
    gone: Collection[str] | None = None,
) -> Evaluation:
    """Return the state of some parts of a dataset or the prompts; see `staleness.evaluate`."""
    return staleness.evaluate(
        dataset=dataset,
        model=model,
        roots=() if dataset == PROMPTS else facts.scan(dataset).roots,
        sources=sources,
        owned=owned,
        recipes={part: _recipe_digest(facts, dataset, model, part) for part in sources},
        memo=facts.memo,
        found=found,
        layout=facts.layout(model),
        settings=facts.config.datasets.get(dataset),
        gone=gone,
    )


def _recipe_digest(facts: Facts, dataset: str, model: str, part: str) -> str:
    recipe = facts.recipe(dataset, model, kind_of(part))
    return digest.of_value(recipe) if recipe else UNKNOWN


def _evaluate_dataset(facts: Facts, dataset: str, model: str, parts: Sequence[str]) -> Evaluation:
    """Return the state of some parts, by a remembered verdict where nothing changed."""
    settings, layout = facts.config.datasets[dataset], facts.layout(model)
    recipes = {part: _recipe_digest(facts, dataset, model, part) for part in parts}
    control, skipped = facts.control(dataset), facts.skipped(dataset)
    listings: list[str | None] = [control and control.fingerprint]
    if settings.metadata_file is not None:
        listings.append(str(metadata.metadata_stat(dataset, settings.metadata_file)))
    version = [latentmake.__version__, latentmake.PLAN_VERSION]
    base = [version, dataset, model, layout.name, recipes, listings, settings.model_dump()]

    def evaluated(
        items: Sequence[Item], owned: set[str], found: Listing, gone: Collection[str] | None
    ) -> Evaluation:
        latents = [source_of("latents", item) for item in items]  # the same at each resolution
        sources = {
            part: latents
            if kind_of(part) == "latents"
            else [source_of(part, item, controlled_text=layout.controlled_text) for item in items]
            for part in parts
        }
        state = evaluate(facts, dataset, model, sources, owned=owned, found=found, gone=gone)
        if not any(kind_of(part) == "text" for part in parts):  # the trainer encodes it
            state.unreadable |= _unreadable_captions(facts.memo, items)
        return state

    folder = Folder(f"cache/{dataset}/{model}")
    asked = Asked(dataset, model, tuple(parts), digest.of_value(base), facts.scan(dataset), folder)
    if not skipped and dataset not in facts.unreadable:
        snapshot = snapshots.latest(facts.memo, asked)
        if answer := facts.memo.verdict(asked.question):
            return staleness.recall(answer, snapshot.lines_of(asked) if snapshot else None)
        facts.note_unused(dataset)
        if snapshot and (found := changes.changed(facts, asked, snapshot, evaluated)):
            if _learn_verdict(facts, asked, found[0]):
                snapshots.keep(facts.memo, asked, found[1], found[0])
            return found[0]
    items, faults = facts.items(dataset, model)
    without = {fault["stem"] for fault in skipped}
    wanted = [item for item in items if item.stem not in without]
    owned = {item.stem for item in items} | {fault.stem for fault in faults}
    if layout.drops_skipped and settings.on_error == "skip":
        owned = {item.stem for item in wanted}
    state = evaluated(wanted, owned, folder.listing(), None)
    places = {item.stem: manifest.place_of(item, item.image, layout) for item in wanted}
    state.images = manifest.images_digest(places.values())
    if not faults and not skipped:
        _learn_verdict(facts, asked, state)
        snapshots.keep(facts.memo, asked, places, state)
    return state


def _learn_verdict(facts: Facts, asked: Asked, state: Evaluation) -> bool:
    """Remember the answer to a question; return False where anything is to do."""
    if verdict := staleness.remember(state):
        facts.memo.learn_verdict(asked.question, verdict)
    return verdict is not None


def _unreadable_captions(memo: Memo, items: Iterable[Item]) -> dict[str, SourceError]:
    """Return stem -> fault of the captions in files that cannot be read."""
    found: dict[str, SourceError] = {}
    for item in items:
        if item.caption is not None and not s3.is_remote(item.caption):
            try:
                memo.digest_of_file(Path(item.caption))
            except OSError as error:
                found[item.stem] = unreadable(item.caption, error)
    return found


def _evaluate_prompts(facts: Facts, model: str, texts: Iterable[str]) -> Evaluation:
    """Return the state of some prompts of one model; those of all its runs have an owner."""
    owned = {source.stem for source in prompt_sources(known_prompts(facts.config, model))}
    found = Folder(f"cache/{PROMPTS}/{model}").listing()
    return evaluate(
        facts, PROMPTS, model, {"text": prompt_sources(texts)}, owned=owned, found=found
    )
