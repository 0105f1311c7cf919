"""Plan of a run's manifest job: whether manifest and lock still fit, and the job's order."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping

from latentmake import digest
from latentmake.config.runs import Run
from latentmake.layouts import kind_of
from latentmake.plan import holdout, manifest
from latentmake.plan.facts import Facts
from latentmake.plan.parts import PROMPTS, Part, RunPlan, part_names, read_lock, run_folder
from latentmake.plan.staleness import PartState

_Skipped = dict[str, list[dict[str, str]]]


def plan_manifest(
    facts: Facts, plan: RunPlan, run: Run, *, force: bool = False, dry: bool = False
) -> None:
    """Decide whether a run's manifest and lock fit; where not, or with `force`, write the order.

    The plan of the run gets its faults, and the order or the lock's digest. The order of a `dry`
    run, which nobody reads, lists no items.
    """
    datasets = {name: facts.config.datasets[name] for name in run.datasets}
    faults = {name: facts.known_faults(name, run.model) for name in datasets}
    plan.faults = {name: found for name, found in faults.items() if found}
    skipped = _skipped(facts, plan, run)
    validation = run.validation.items if run.validation else 0
    if validation:
        found = [item.image for name in datasets for item in facts.items(name, run.model)[0]]
        holdout.refuse_too_many(plan.name, validation, found)
    skip = [name for name, settings in datasets.items() if settings.on_error == "skip"]
    repeats = {name: settings.num_repeats for name, settings in datasets.items()}
    texts = {name: _text_digests(facts, run, name) for name in datasets}
    states = {
        f"{name}/{part}": plan.parts[Part(name, run.model, part)]
        for name in datasets
        for part in part_names(facts.config, run, name)
    }
    lock = read_lock(plan.name)
    fresh = (
        not any(state.stale for state in states.values())
        and lock.digest == _digest_of(states, texts, repeats, validation)
        and _stems(lock.aside) == _stems(skipped)
        and lock.images == {name: plan.images[name] for name in datasets}
        and lock.manifest == facts.digest_of(run_folder(plan.name) / "manifest.jsonl")
        # Those of prompts wait for the next job: no manifest names them.
        and not any(state.orphans for part, state in plan.parts.items() if part.dataset != PROMPTS)
        and skipped.keys() <= set(skip)
    )
    if fresh and not force:
        plan.lock = lock.data
        return
    former = {name: _text_digests(facts, run, name, former=True) for name in datasets}
    if former != texts and lock.digest == _digest_of(states, former, repeats, validation):
        rule = facts.layout(run.model).lines_rule
        counts = {name: len(texts[name].items() - former[name].items()) for name in datasets}
        plan.rules = {name: (rule, count) for name, count in counts.items() if count}
    orphans = [path for state in plan.parts.values() for path in state.orphans]
    replaced = [stale.found for state in plan.parts.values() for stale in state.stale]
    known = {} if dry else {part: state.known() for part, state in plan.parts.items()}
    order = manifest.ManifestOrder(
        run=plan.name,
        model=run.model,
        repeats=repeats,
        skip=skip,
        items=[] if dry else [*manifest_items(facts, run, known, texts)],
        faults=skipped,
        orphans=sorted(orphans),
        planned=time.time_ns(),
        layout=facts.layout(run.model).name,
        replaced=[each.partition("@")[0] for each in replaced if each is not None],
        validation=validation,
    )
    plan.manifest_order = order.path
    if not facts.asks:
        order.write()


def _digest_of(
    states: Mapping[str, PartState],
    texts: Mapping[str, Mapping[str, str]],
    repeats: Mapping[str, int],
    validation: int,
) -> str:
    """Return the digest of a lock of parts in which all is fresh."""
    keys = {part: state.keys or "" for part, state in states.items()} | {
        f"{name}/{manifest.CAPTIONS}": manifest.keys_digest(found.items())
        for name, found in texts.items()
        if found
    }
    return manifest.lock_digest(keys, repeats, validation)


def _skipped(facts: Facts, plan: RunPlan, run: Run) -> _Skipped:
    """Return dataset -> faults of the items without caches."""
    found: _Skipped = {}
    for name in run.datasets:
        faults = [
            {"stem": fault.stem, "path": fault.path, "digest": "", "line": fault.line}
            for fault in plan.faults.get(name, [])
        ]
        if noted := [*facts.skipped(name), *faults]:
            found[name] = noted
    return found


def _stems(skipped: _Skipped) -> set[tuple[str, str]]:
    return {(name, fault["stem"]) for name, faults in skipped.items() for fault in faults}


def _text_digests(facts: Facts, run: Run, name: str, *, former: bool = False) -> dict[str, str]:
    """Return stem -> digest of an item's text, where the trainer encodes that itself.

    With `former` of the text as an earlier release read it.

    sd-scripts does so with Stable Diffusion 1.x and 2.x: no cache tells that a caption changed.
    """
    if any(kind_of(part) == "text" for part in part_names(facts.config, run, name)):
        return {}
    without = {fault["stem"] for fault in facts.skipped(name)}
    found: dict[str, str] = {}
    for item in facts.items(name, run.model)[0]:
        if item.stem in without:
            continue
        texts = item.texts
        if former and item.former is not None:
            texts = item.former or None
        if texts is not None:
            found[item.stem] = digest.of_value(texts)
        elif item.caption is not None:
            found[item.stem] = facts.digest_of(item.caption) or "missing"
        else:
            found[item.stem] = ""
    return found


def manifest_items(
    facts: Facts,
    run: Run,
    known: Mapping[Part, Mapping[str, str]],
    texts: Mapping[str, Mapping[str, str]],
) -> Iterator[manifest.ManifestItem]:
    """Yield the items of a run with the names of their caches.

    Args:
        facts: of its datasets and model.
        run: its section of the configuration.
        known: part -> name of a target (`Layout.identity`) -> its key.
        texts: dataset -> stem -> digest of its text, where that is not cached.
    """
    layout = facts.layout(run.model)
    for name in run.datasets:
        settings, digests = facts.config.datasets[name], texts.get(name, {})
        parts = [
            (part, layout.folder(name, run.model, part), known.get(Part(name, run.model, part), {}))
            for part in part_names(facts.config, run, name)
        ]
        for item in facts.items(name, run.model)[0]:
            targets = {
                part: [
                    (named.path, keys.get(layout.identity(item.stem, named.path)))
                    for named in layout.named(
                        folder, part, item.stem, item.media, settings, item.span
                    )
                ]
                for part, folder, keys in parts
            }
            yield manifest.ManifestItem(
                name,
                item.stem,
                item.image,
                targets,
                item.caption,
                item.controls,
                item.texts,
                digests.get(item.stem),
                None if item.span is None else [*item.span],
                item.row,
                item.layers,
            )
