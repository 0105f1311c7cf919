"""Plans of runs: whether manifest and lock still fit, and the items of a run or publication."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from pydantic import BaseModel
from pydantic_core import to_json

from latentmake.base import atomic, digest
from latentmake.base.machine import Need
from latentmake.config.root import Run
from latentmake.data.contents import Contents, former_digests
from latentmake.data.item import Fault
from latentmake.layouts.layout import CAPTIONS as MADE_CAPTIONS
from latentmake.layouts.layout import kind_of
from latentmake.plan.facts import Facts
from latentmake.plan.judge import FORCED, PartState
from latentmake.plan.manifest import (
    CAPTIONS,
    TEXTS,
    Lock,
    ManifestOrder,
    Member,
    digest_of_texts,
    keys_digest,
    lock_fault,
    read_lock,
    refuse_too_many,
    result_folder,
    run_folder,
)
from latentmake.plan.orders import (
    PROMPTS,
    EncodingJob,
    Order,
    Part,
    part_names,
    parts_of,
    run_order,
    settings_digest,
    targets_of,
)
from latentmake.plan.product import Difference, Made, Product, judge, some

_ANEW = Difference("the manifest is written anew")
_AWAITED = "awaited"
"""Digest, in a plan, of texts that a captioner must make first."""
_Texts = Mapping[str, tuple[str, Mapping[str, str]]]
"""Dataset -> part of the lock, and stem -> digest of texts that a trainer encodes itself."""


@dataclass
class RunPlan:
    """Plan of one run.

    Attributes:
        manifest_order: order of the manifest job; None if manifest and lock are fresh.
        trainer_order: order of training, checklist and publication; None if it has no trainer.
        images: dataset -> digest of the places of its images.
        lock: digest of the training data, from its lock; None if it may change in this build.
        outdated: why the manifest must be written; empty if manifest and lock are fresh.
        reasons: why the run must be trained, or its files and pictures be written again; empty if
            it is up to date.
    """

    name: str
    parts: dict[Part, PartState]
    orders: list[Order] = field(default_factory=list)  # orders of its stale targets
    faults: dict[str, list[Fault]] = field(default_factory=dict)
    manifest_order: Path | None = None
    trainer_order: Path | None = None
    trainer: BaseModel | None = None  # the order whose file is `trainer_order`
    images: dict[str, str] = field(default_factory=dict)
    lock: str | None = None
    forecast: str = ""  # memory, disk and time of its training in words, as far as known
    needs: list[Need] = field(default_factory=list)
    outdated: list[Difference] = field(default_factory=lambda: [_ANEW])
    reasons: list[Difference] = field(default_factory=list)
    vanished: set[str] = field(default_factory=set)  # cache files that are kept apart or will be
    warnings: list[str] = field(default_factory=list)  # lines on these files, and on captions
    note: str = ""  # line on a training that is resumed, or only writes files again

    @property
    def training_order(self) -> Path | None:
        """Order of its training; None if it is trained already or has no trainer."""
        return self.trainer_order if self.reasons else None

    @property
    def reason(self) -> str:
        """Line that says why a run is trained again, or only its manifest written; else ""."""
        what, reasons = ("training", self.reasons) if self.reasons else ("manifest", self.outdated)
        is_first = not (result_folder(self.name) / "training.json").is_file()
        return "" if is_first or not reasons else f"{what} of {self.name}: {some(reasons)}"

    @property
    def order_paths(self) -> dict[str, str]:
        """Kind of an order (`manifest`, `train`, `trainer`) -> path."""
        kinds = "manifest", "train", "trainer"
        orders = self.manifest_order, self.training_order, self.trainer_order
        return {kind: str(path) for kind, path in zip(kinds, orders, strict=True) if path}

    def awaited(self, prompts: Collection[str]) -> list[Difference]:
        """Return what a build must do before clips of these prompts can be generated or judged."""
        if self.training_order is not None or self.lock is None:
            return [Difference("the run is trained first"), *(self.reasons or self.outdated)]
        waits = any(
            work.item.text in prompts and target.reason != FORCED
            for part, state in self.parts.items()
            for work in (state.stale if part.dataset == PROMPTS else ())
            for target in work.targets
        )
        return [Difference("prompts are to be encoded")] if waits else []


@dataclass
class Plan:
    """Plans of the requested runs, and their jobs without duplicates.

    Attributes:
        runs: run -> its plan.
        jobs: encoding jobs of all runs.
        named: part -> cache files that the command names, and made captions that these wait for.
        needs: disk space for files other than caches and trainings.
    """

    runs: dict[str, RunPlan]
    jobs: list[EncodingJob] = field(default_factory=list)
    named: dict[Part, Collection[str]] = field(default_factory=dict)
    needs: list[Need] = field(default_factory=list)

    @property
    def orders(self) -> list[Order]:
        """Orders of all jobs."""
        return [order for job in self.jobs for order in job.orders]

    def leave_out_prompts(self, drawing: Collection[str]) -> None:
        """Leave out the embeddings of prompts that no run uses now: they wait for a training.

        Runs that will be trained use their prompts, and so do the `drawing` runs.
        """
        draws = {name for name, run in self.runs.items() if run.training_order} | {*drawing}
        needed = {part.model for name in draws for part in self.runs[name].parts}

        def kept(orders: Iterable[Order]) -> list[Order]:
            return [order for order in orders if order.dataset != PROMPTS or order.model in needed]

        for run in self.runs.values():
            run.orders = kept(run.orders)
            for part, state in run.parts.items():
                if part.dataset == PROMPTS and part.model not in needed:
                    run.parts[part] = replace(state, stale=[])
        self.jobs = [EncodingJob(tuple(some)) for job in self.jobs if (some := kept(job.orders))]


def plan_manifest(facts: Facts, plan: RunPlan) -> None:
    """Decide whether a run's manifest and lock still fit; if not, or if forced, write the order.

    This sets the faults of the run's plan, its manifest order, and its lock's digest if that stays.
    """
    run = facts.config.runs[plan.name]
    datasets = {name: facts.config.datasets[name] for name in run.datasets}
    faults_of = {name: facts.faults.get((name, run.model)) for name in datasets}
    plan.faults = {name: faults for name, faults in faults_of.items() if faults}
    regular = is_reg(facts, plan.name)
    skip = [name for name, settings in datasets.items() if settings.on_error == "skip"]
    if validation := run.validation.items if run.validation else 0:
        learned = [name for name in datasets if name not in regular]
        sources = [item.image for name in learned for item in facts.items(name, run.model)[0]]
        # Faulty sources that must be repaired before the training count as well.
        repaired = [name for name in learned if name not in skip]
        sources += [fault.path for name in repaired for fault in plan.faults.get(name, ())]
        refuse_too_many(plan.name, validation, sources)
    repeats = {name: settings.num_repeats for name, settings in datasets.items()}
    lock, skipped = read_lock(plan.name), _skipped(facts, plan)
    texts = {name: _text_digests(facts, run, name, lock) for name in datasets}
    today = Lock(repeats=repeats, held_out=[""] * validation, is_reg=regular, aside=skipped)
    differences = _differences(facts, plan, lock, today, texts)
    if not differences:
        # Forced caches keep their keys, so the lock stays. The manifest only waits for them.
        words = ("manifest", "latents", "text")
        if not facts.forced & {f"{word}_{plan.name}" for word in words}:
            plan.outdated = []
            return
    plan.outdated = differences or plan.outdated
    items, captioned = [], {}
    if not facts.read_only:
        captioned = {
            name: settings
            for name, settings in datasets.items()
            if any(item.awaits_caption for item in facts.items(name, run.model)[0])
        }
        keys = {part: state.keys_by_name() for part, state in plan.parts.items()}
        items = [*members(facts, run, keys, texts)]
    order = ManifestOrder.model_construct(  # to validate very many items would take seconds
        run=plan.name,
        model=run.model,
        repeats=repeats,
        skip=skip,
        items=items,
        faults=skipped,
        orphans=sorted(path for state in plan.parts.values() for path in state.orphans),
        vanished=sorted(plan.vanished),
        planned=time.time_ns(),
        layout=facts.layout(run.model).name,
        validation=validation,
        is_reg=regular,
        captioned=captioned,
    )
    plan.manifest_order = Path(write_order(facts, plan.name, "manifest", order))


def faulty_items(facts: Facts, plan: RunPlan) -> dict[str, list[str]]:
    """Return dataset -> a line for each faulty item, found by this plan or by an earlier job.

    The fault that a job found counts if the item has not changed since, and is either skipped or
    still to be encoded.
    """
    faulty: dict[str, list[str]] = {}
    for name in facts.config.runs[plan.name].datasets:
        lines = [fault.line for fault in plan.faults.get(name, ())]
        if noted := facts.noted(name, facts.config.runs[plan.name].model):
            parts = (state for part, state in plan.parts.items() if part.dataset == name)
            stale = {work.item.stem for state in parts for work in state.stale}
            skips = facts.config.datasets[name].on_error == "skip"
            lines += [entry["line"] for entry in noted if skips or entry["stem"] in stale]
        faulty[name] = [*dict.fromkeys(lines)]
    return faulty


def is_reg(facts: Facts, run: str) -> list[str]:
    """Return the names of a run's datasets of regularisation images, sorted."""
    config = facts.config
    return sorted(name for name in config.runs[run].datasets if config.datasets[name].is_reg)


def _differences(
    facts: Facts, plan: RunPlan, lock: Lock, today: Lock, texts: _Texts
) -> list[Difference]:
    """Return why manifest and lock must be written; set the plan's lock if its digest stays.

    Args:
        facts: facts about the datasets.
        plan: plan of the run.
        lock: present lock.
        today: lock as it should be, still without keys.
        texts: dataset -> part and digests of texts that are not cached.
    """
    states = {
        f"{part.dataset}/{part.name}": state
        for part in parts_of(facts.config, facts.config.runs[plan.name])
        if part.dataset != PROMPTS and part.model != MADE_CAPTIONS  # manifests name neither
        if (state := plan.parts[part]).fresh or state.stale  # locks have no part without targets
    }
    faulty = (name for name in today.aside if facts.config.datasets[name].on_error != "skip")
    differences = stale_targets(states)
    differences += [Difference(f"items of {name} are faulty") for name in faulty]
    # Stale targets are reported already, so unknown keys count as unchanged.
    keys = {part: state.keys or lock.parts.get(part) for part, state in states.items()}
    for name, (part, digests) in texts.items():
        if awaiting := [*digests.values()].count(_AWAITED):
            of_texts = f"{awaiting} of {len(digests)} texts of {name}"
            differences.append(Difference(f"{of_texts}: a captioner makes them"))
            keys[part] = lock.parts.get(part)
        elif digests:
            keys[part] = keys_digest(digests.items())
    parts = dict(lock.parts)
    for name in today.repeats:
        if f"{name}/{TEXTS}" in keys and parts.pop(f"{name}/{CAPTIONS}", ""):
            del keys[f"{name}/{TEXTS}"]
            what = "edited or saved again, and a lock of an earlier release cannot tell which"
            differences.append(Difference(f"captions of {name} were {what}"))
    made = Made(parts=lock.values(parts)) if lock.digest else None
    stays = not differences and today.data_values(keys) == lock.data_values(parts)
    differences += judge(Product(lock_fault(plan.name), today.values(keys)), made)
    if made:
        if lock.changed:
            differences.append(Difference("the dataset's lock was changed"))
        for name, now in plan.images.items():
            if lock.images.get(name) != now != ("" if name in lock.images else digest.of_lines(())):
                differences.append(Difference(f"images of {name} came, went or moved"))
        manifest = run_folder(plan.name) / "manifest.jsonl"
        if lock.manifest != facts.digest_of(manifest):
            differences.append(Difference(f"{manifest} is missing, or was changed"))
        elif stays and not lock.changed:  # skipped items and places of images do not train
            plan.lock = lock.data
    # Orphans of prompts wait for the next job.
    others = (state for part, state in plan.parts.items() if part.dataset != PROMPTS)
    if orphans := sum(len(state.orphans) for state in others):
        differences.append(Difference(f"cache files without an item: {orphans}"))
    return differences


def stale_targets(states: Mapping[str, PartState]) -> list[Difference]:
    """Return a sentence for each dataset, kind and reason of stale targets."""
    stale, counts = Counter[tuple[str, str]](), Counter[str]()
    for name, state in states.items():
        dataset, part = name.split("/", 1)
        kind = f"{'texts' if kind_of(part) == 'text' else 'latents'} of {dataset}"
        counts[kind] += state.fresh + state.reasons.total()
        stale.update({(kind, reason): number for reason, number in state.reasons.items()})
    numbers = ((kind, reason, stale[kind, reason]) for kind, reason in stale if reason != FORCED)
    return [Difference(f"{n} of {counts[kind]} {kind}: {reason}") for kind, reason, n in numbers]


def _skipped(facts: Facts, plan: RunPlan) -> dict[str, list[dict[str, str]]]:
    """Return dataset -> faults of the items that get no caches."""
    skipped: dict[str, list[dict[str, str]]] = {}
    for name in plan.images:
        faults, settings = plan.faults.get(name, []), facts.config.datasets[name]
        common = {"dataset": name, "model": facts.config.runs[plan.name].model, "digest": ""}
        if faults:
            common["settings"] = settings_digest(settings)
        own = [common | {"stem": f.stem, "path": f.path, "line": f.line} for f in faults]
        skipped[name] = [*facts.skipped(name, common["model"]), *own]
    return {name: faults for name, faults in skipped.items() if faults}


def _text_digests(facts: Facts, run: Run, name: str, lock: Lock) -> tuple[str, dict[str, str]]:
    """Return a part of the lock, and stem -> digest of texts that the trainer encodes itself.

    sd-scripts encodes the texts of Stable Diffusion 1.x and 2.x itself, so no cache shows that a
    caption changed. A lock of a release before 0.3 has digests of caption files (`CAPTIONS`). These
    are returned as long as the memo or the present file shows that the texts are the same.
    """
    part = f"{name}/{TEXTS}"
    if any(kind_of(other) == "text" for other in part_names(facts.config, run, name)):
        return part, {}
    items = facts.wanted_items(name, run.model)
    contents = Contents(
        (file for item in items for file in item.files), facts.memo, facts.config.datasets[name]
    )
    texts = {
        item.stem: item.texts or ([contents.text(item)] if item.caption else []) for item in items
    }
    awaiting = {item.stem for item in items if item.awaits_caption}
    if (locked := lock.parts.get(f"{name}/{CAPTIONS}")) is not None:
        files = {item.stem: item.caption for item in items if item.texts is None and item.caption}
        # Stats and digests that the memo has, perhaps of an earlier content.
        then = facts.memo.sources.look_up([*files.values()])
        former = {
            stem: digest.of_value(variants) if variants else "" for stem, variants in texts.items()
        }
        for stem, path in files.items():
            was = then.get(path, (None, ""))[1]
            same = was in former_digests(texts[stem][0])
            former[stem] = was if same else facts.digest_of(path) or "missing"
        if keys_digest(former.items()) == locked:
            return f"{name}/{CAPTIONS}", former
    return part, {
        stem: _AWAITED if stem in awaiting else digest_of_texts(variants)
        for stem, variants in texts.items()
    }


def members(
    facts: Facts,
    run: Run,
    keys_of: Mapping[Part, Mapping[str, str]],
    texts: _Texts,
) -> Iterator[Member]:
    """Yield the items of a run with the names of their caches.

    `keys_of` is part -> name (`Layout.identity`) -> key of a target, as far as the plan knows it.
    `texts` has the texts that are not cached.
    """
    layout = facts.layout(run.model)
    for name in run.datasets:
        items, settings = facts.items(name, run.model)[0], facts.config.datasets[name]
        paths_of = {item.stem: dict[str, list[tuple[str, str | None]]]() for item in items}
        for part_name in part_names(facts.config, run, name):
            place = Part(name, run.model, part_name)
            keys = keys_of.get(place, {})
            for item, targets in targets_of(layout, settings, place, items):
                paths_of[item.stem][part_name] = [
                    (target.path, keys.get(layout.identity(item.stem, target.path)))
                    for target in targets
                ]
        part, digests = texts.get(name, ("", {}))
        for item in items:
            text = (part, digests[item.stem]) if item.stem in digests else None
            yield Member(name, item, paths_of[item.stem], text)


def write_order(facts: Facts, run: str, kind: str, order: object) -> str:
    """Write a run's order of a kind, unless the command is read-only; return its path."""
    path = run_order(run, kind, time.time_ns())
    if not facts.read_only:
        atomic.write(path, to_json(order))
    return str(path)
