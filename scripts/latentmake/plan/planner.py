"""Planner: stale targets of runs, and the orders of the jobs that make them.

Only the process that the user started makes a plan. It does not import torch, and does not open
files whose stat is known.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from itertools import chain

from latentmake.base import digest
from latentmake.layouts.layout import CAPTIONS
from latentmake.models.inspection import check_run
from latentmake.plan import store
from latentmake.plan.facts import Facts
from latentmake.plan.judge import State
from latentmake.plan.orders import PROMPTS, EncodingJob, Order, Part, parts_of, prompts_of
from latentmake.plan.receipts import learn_receipts
from latentmake.plan.remembered import judge_dataset, judge_prompts
from latentmake.plan.run_plan import Plan, RunPlan, plan_manifest

_Place = tuple[str, str]  # dataset and model


def make_plan(
    facts: Facts,
    names: Iterable[str],
    *,
    generated: Collection[str] = (),
    side_by_side: int | None = 1,
    files: Collection[str] = (),
    batched: bool = True,
) -> Plan:
    """Plan some runs and cache files; write the orders, unless the command is read-only.

    Args:
        facts: facts about the configuration.
        names: names of the runs.
        generated: runs that generate clips, so that the prompts of these are encoded.
        side_by_side: number of jobs that run at a time on this machine; None on a cluster.
        files: cache files that the command names.
        batched: whether the plan has orders; a command that only asks needs none.

    Raises:
        ConfigError: another project with other items uses the same cache folder.
    """
    runs = {name: facts.config.runs[name] for name in names}
    learn_receipts(facts.memo)
    needed: dict[_Place, dict[str, set[str]]] = {}  # place -> part -> runs that need it
    parts: dict[str, list[Part]] = {}
    for name, run in runs.items():
        check_run(facts.config, name, run, facts.memo.remembered)
        parts[name] = parts_of(facts.config, run, generated=name in generated)
        for part in parts[name]:
            needing = needed.setdefault((part.dataset, part.model), {})
            needing.setdefault(part.name, set()).add(name)
    states = _judge_all(facts, needed, generated)
    stale = {
        place: {name: part.stale for name, part in state.parts.items()}
        for place, state in states.items()
        if any(part.stale for part in state.parts.values())
    }
    for (dataset, _), state in states.items():
        store.refuse_other_items(dataset, state.parts.values())
    plans = {
        name: RunPlan(
            name,
            parts={
                Part(*place, part): part_state
                for place in dict.fromkeys(part[:2] for part in parts[name])
                for part, part_state in states[place].parts.items()
                if name in needed[place].get(part, {name})
            },
            images={dataset: states[dataset, run.model].images for dataset in run.datasets},
        )
        for name, run in runs.items()
    }
    jobs, wanted = list[EncodingJob](), list[tuple[Order, frozenset[str]]]()
    named: dict[Part, tuple[Collection[str], State]] = {}
    datasets = {dataset for dataset, _ in states} - {PROMPTS}
    apart = {dataset: store.kept_apart(facts.memo, dataset) for dataset in datasets}
    if files:
        from latentmake.plan.batches import named_and_awaited

        named = named_and_awaited(facts, files)
    if files or stale:
        store.mark_reusable(facts.memo, [*states.values(), *(state for _, state in named.values())])
    if batched and (files or stale):
        from latentmake.plan.batches import batches, jobs_of, named_batches

        count = side_by_side or 1
        places = sorted(stale, key=lambda place: place[1] != CAPTIONS)  # captions come first
        for order, wanting in chain(
            *(batches(facts, *place, needed[place], stale[place], count) for place in places),
            named_batches(facts, named, states.values(), count),
        ):
            if order.kind == "text" and any(work.item.awaits_caption for work in order.items):
                made = (made for made, _ in wanted if made.kind == CAPTIONS)
                receipts = (str(made.receipt) for made in made if made.dataset == order.dataset)
                order = order.after(receipts)
            if facts.read_only:
                order.name = digest.of_lines(order.paths)[:20]  # its content is serialised nowhere
            else:
                order.write()
            for name in wanting:
                plans[name].orders.append(order)
            wanted.append((order, wanting))
        jobs = jobs_of(wanted, side_by_side)
    lost = {
        name: store.vanished(facts.memo, name, states, facts.scan(name), kept)
        for name, kept in apart.items()
    }
    for plan in plans.values():
        for name in plan.images:
            plan.warnings += facts.doubts(name, runs[plan.name].model)
            if unread := facts.unread(name):
                plan.warnings.append(unread)
            plan.vanished |= lost[name]
            if lost[name]:
                plan.warnings.append(store.warning(name, len(lost[name]), facts.options))
        plan_manifest(facts, plan)
    return Plan(plans, jobs, {part: paths for part, (paths, _) in named.items()})


def _judge_all(
    facts: Facts, needed: Mapping[_Place, Mapping[str, set[str]]], generated: Collection[str]
) -> dict[_Place, State]:
    states: dict[_Place, State] = {}
    pending = list(needed)
    while pending:
        dataset, model = place = pending.pop(0)
        if dataset == PROMPTS:
            asking = {name: facts.config.runs[name] for name in needed[place]["text"]}
            texts = (
                text
                for name, run in asking.items()
                for text in prompts_of(facts.config, run, generated=name in generated)
            )
            states[place] = judge_prompts(facts, model, texts)
            continue
        if model == CAPTIONS:
            state = states[place] = facts.made_captions(dataset)
        else:
            state = states[place] = judge_dataset(facts, *place, [*needed[place]])
        if state.unreadable:
            facts.add_faults(dataset, state.unreadable)
            # Every model leaves these items out, so places that were judged before must be again.
            again = [judged for judged in states if judged[0] == dataset]
            pending += [judged for judged in again if judged not in pending]
    return states
