"""State of a dataset's targets: as long as no file came, went or changed, it is remembered."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cache, partial

import latentmake
from latentmake import digest
from latentmake.index.memo import Folder
from latentmake.layouts.layout import parsed
from latentmake.plan.facts import Facts
from latentmake.plan.orders import PROMPTS, place_of, prompt_items
from latentmake.plan.state import PartState, State


def judge_dataset(facts: Facts, dataset: str, model: str, parts: Sequence[str]) -> State:
    """Return the state of some parts; the memo holds it while all is fresh."""
    folder, memo = Folder(f"cache/{dataset}/{model}"), facts.memo.snapshots

    @cache
    def judged() -> State:
        return _judged(facts, dataset, model, parts, folder)

    def known(part: str) -> Mapping[str, str]:
        return judged().parts[part].known()

    if facts.skipped(dataset) or dataset in facts.unreadable:
        return judged()
    asked = digest.of_value(
        [
            [latentmake.__version__, latentmake.PLAN_VERSION],
            facts.layout(model).name,
            {part: facts.recipe_digest(dataset, model, parsed(part).kind) for part in parts},
            facts.config.datasets[dataset].model_dump(),
            [facts.scan(dataset, key).fingerprint for key in ("path", "control_directory")],
            folder.fingerprint,
        ]
    )
    name = "\n".join((dataset, model, *parts))
    before, images, counts = json.loads(memo.get(name) or "[null, null, null]")
    if before == asked:
        states = {
            part: PartState(fresh, known=partial(known, part), remembered=keys)
            for part, (fresh, keys) in counts.items()
        }
        return State(states, images)
    state = judged()
    found = state.parts.values()
    faulty = state.unreadable or facts.faults.get((dataset, model))
    if not faulty and not any(each.stale or each.orphans for each in found):
        counts = {part: (state.parts[part].fresh, state.parts[part].keys) for part in parts}
        memo.learn(name, None, json.dumps([asked, state.images, counts]))
    return state


def _judged(facts: Facts, dataset: str, model: str, parts: Sequence[str], folder: Folder) -> State:
    """Judge all targets of some parts."""
    items, faults = facts.items(dataset, model)
    wanted, layout = facts.wanted_items(dataset, model), facts.layout(model)
    owned = {item.stem for item in items} | {fault.stem for fault in faults}
    if layout.flat and facts.config.datasets[dataset].on_error == "skip":
        owned = {item.stem for item in wanted}
    latents = [x.inputs("latents", layout) for x in wanted]  # the same at each resolution
    inputs = {
        part: [x.inputs(part, layout) for x in wanted] if parsed(part).text else latents
        for part in parts
    }
    judge = facts.judge(dataset, model, parts, wanted)
    if not any(parsed(part).kind == "text" for part in parts):  # the trainer encodes it
        for each in (x.inputs("text", layout) for x in wanted):
            judge.contents.of(each)
    state = judge.judge(inputs, owned, folder.listing())
    state.images = digest.of_lines(place_of(item, layout) for item in wanted)
    return state


def judge_prompts(facts: Facts, model: str, texts: Iterable[str]) -> State:
    """Return the state of some prompts of one model; those of all its runs have an owner."""
    owned = {item.stem for item in facts.wanted_items(PROMPTS, model)}
    found = Folder(f"cache/{PROMPTS}/{model}").listing()
    items = prompt_items(texts)
    return facts.judge(PROMPTS, model, ["text"], items).judge({"text": items}, owned, found)
