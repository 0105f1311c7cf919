"""Plans of runs, whether a manifest and lock still fit, and the items of a publication."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from pydantic import BaseModel
from pydantic_core import to_json

from latentmake import digest
from latentmake.config.root import Run
from latentmake.data.contents import encoded, former_digests
from latentmake.data.item import Fault
from latentmake.errors import DatasetError, joined
from latentmake.files import atomic
from latentmake.files.workspace import Need
from latentmake.layouts.layout import parsed
from latentmake.plan.facts import Facts
from latentmake.plan.manifest import (
    CAPTIONS,
    REGULARISATION,
    TEXTS,
    Lock,
    ManifestOrder,
    Member,
    keys_digest,
    lines_of,
    lock_fault,
    read_lock,
    refuse_too_many,
    result_folder,
    row_of,
    run_folder,
)
from latentmake.plan.orders import (
    PROMPTS,
    EncodingJob,
    Order,
    Part,
    job_of,
    part_names,
    parts_of,
    run_order,
    settings_digest,
    targets_of,
)
from latentmake.plan.state import FORCED, Difference, PartState, some, value_differences

_ANEW = Difference("the manifest is written anew")
_Skipped = dict[str, list[dict[str, str]]]


@dataclass
class RunPlan:
    """Plan of one run.

    Attributes:
        manifest_order: of the manifest job; None where manifest and lock are fresh.
        trainer_order: of training, checklist and publication; None where it has no trainer.
        images: dataset -> digest of the paths of its images.
        lock: digest of what trains, from its lock; None where that may change.
        outdated: why its manifest is to be written; empty where that and the lock are fresh.
        reasons: why it is to be trained, or its files and pictures written; empty where it is.
    """

    name: str
    parts: dict[Part, PartState]
    orders: list[Order] = field(default_factory=list)  # of the batches that make its stale targets
    faults: dict[str, list[Fault]] = field(default_factory=dict)
    manifest_order: Path | None = None
    trainer_order: Path | None = None
    trainer: BaseModel | None = None  # the order whose file is `trainer_order`
    images: dict[str, str] = field(default_factory=dict)
    lock: str | None = None
    forecast: str = ""  # memory, disk and time of its training in words, where they are known
    needs: list[Need] = field(default_factory=list)
    outdated: list[Difference] = field(default_factory=lambda: [_ANEW])
    reasons: list[Difference] = field(default_factory=list)
    vanished: set[str] = field(default_factory=set)  # cache files that are kept apart, or will be
    warnings: list[str] = field(default_factory=list)  # lines on these, and on settings of captions
    note: str = ""  # a line on a training that goes on from a checkpoint, or only writes files anew

    @property
    def training_order(self) -> Path | None:
        """Order of its training; None where it is trained, or has no trainer."""
        return self.trainer_order if self.reasons else None

    @property
    def reason(self) -> str:
        """A line that says why a run is trained again; "" of a first training."""
        if not self.reasons or not (result_folder(self.name) / "training.json").is_file():
            return ""
        return f"training of {self.name}: {some(self.reasons)}"

    @property
    def order_paths(self) -> dict[str, str]:
        """Kind of an order (`manifest`, `train`, `trainer`) -> path."""
        orders = {
            "manifest": self.manifest_order,
            "train": self.training_order,
            "trainer": self.trainer_order,
        }
        return {kind: str(path) for kind, path in orders.items() if path is not None}

    def awaits(self, prompts: Collection[str]) -> bool:
        """Whether the embedding of one of these prompts is to be made."""
        return any(
            stale.item.text in prompts and stale.reason != FORCED
            for part, state in self.parts.items()
            for stale in (state.stale if part.dataset == PROMPTS else ())
        )

    def awaited(self, prompts: Collection[str]) -> list[Difference]:
        """Return what a build must do before clips of these prompts can be drawn or judged."""
        if self.training_order is None and self.lock is not None:
            return [Difference("prompts are to be encoded")] if self.awaits(prompts) else []
        return [Difference("the run is trained first"), *(self.reasons or self.outdated)]


@dataclass
class Plan:
    """Plans of the runs asked for; `jobs` encode for them, none twice, and have all `orders`.

    `named` are the cache files that the command names, by part, and `needs` is the room for what is
    made besides caches and trainings.
    """

    runs: dict[str, RunPlan]
    jobs: list[EncodingJob] = field(default_factory=list)
    orders: list[Order] = field(default_factory=list)
    named: dict[Part, Collection[str]] = field(default_factory=dict)
    needs: list[Need] = field(default_factory=list)

    def leave_out_prompts(self, drawing: Collection[str]) -> None:
        """Leave out the embeddings of prompts that no run draws: they wait for a training.

        Runs that are to be trained draw their prompts, and so do the `drawing` ones.
        """
        draws = {name for name, run in self.runs.items() if run.training_order} | {*drawing}
        needed = {part.model for name in draws for part in self.runs[name].parts}
        if not any(x.dataset == PROMPTS and x.model not in needed for x in self.orders):
            return

        def kept(orders: list[Order]) -> list[Order]:
            return [x for x in orders if x.dataset != PROMPTS or x.model in needed]

        for run in self.runs.values():
            run.orders = kept(run.orders)
            for part, state in list(run.parts.items()):
                if part.dataset == PROMPTS and part.model not in needed:
                    run.parts[part] = replace(state, stale=[])
        self.orders = kept(self.orders)
        self.jobs = [job_of(some) for job in self.jobs if (some := kept(list(job.orders)))]


def plan_manifest(facts: Facts, plan: RunPlan) -> None:
    """Decide whether a run's manifest and lock fit; where not, or where forced, write the order.

    The plan of the run gets its faults, and the order or the lock's digest.
    """
    run = facts.config.runs[plan.name]
    datasets = {name: facts.config.datasets[name] for name in run.datasets}
    known = {name: facts.faults.get((name, run.model)) for name in datasets}
    plan.faults = {name: faults for name, faults in known.items() if faults}
    regular = is_reg(facts, plan.name)
    skip = [name for name, settings in datasets.items() if settings.on_error == "skip"]
    if validation := run.validation.items if run.validation else 0:
        learned = [name for name in datasets if name not in regular]
        sources = [item.image for name in learned for item in facts.items(name, run.model)[0]]
        # Nothing trains before these are repaired.
        repaired = [name for name in learned if name not in skip]
        sources += [fault.path for name in repaired for fault in plan.faults.get(name, ())]
        refuse_too_many(plan.name, validation, sources)
    repeats = {name: settings.num_repeats for name, settings in datasets.items()}
    lock, skipped = read_lock(plan.name), _skipped(facts, plan)
    texts = dict(_text_digests(facts, run, name, lock) for name in datasets)
    aside, left_out = (
        {name: sorted({fault["stem"] for fault in each}) for name, each in faults.items() if each}
        for faults in (lock.aside, skipped)
    )
    found = [
        *_data_differences(facts, plan, lock, texts, repeats, validation),
        *value_differences(aside, left_out, "skipped {}"),
        *_file_differences(facts, plan, lock),
        *(Difference(f"items of {name} are faulty") for name in skipped if name not in skip),
    ]
    if not found:
        plan.lock = lock.data
        # Forced caches keep their keys: so the lock stays, and the manifest just waits for them.
        if not facts.forced & {f"{x}_{plan.name}" for x in ("manifest", "latents", "text")}:
            plan.outdated = []
            return
    plan.outdated = found or plan.outdated
    planned = time.time_ns()
    plan.manifest_order = run_order(plan.name, "manifest", planned)
    if facts.asks:
        return
    keys = {part: state.keys_by_name() for part, state in plan.parts.items()}
    order = ManifestOrder(
        run=plan.name,
        model=run.model,
        repeats=repeats,
        skip=skip,
        items=[*members(facts, run, keys, texts)],
        faults=skipped,
        orphans=sorted(path for state in plan.parts.values() for path in state.orphans),
        vanished=sorted(plan.vanished),
        planned=planned,
        layout=facts.layout(run.model).name,
        validation=validation,
        is_reg=regular,
    )
    order.write(plan.manifest_order)


def faulty_items(facts: Facts, plan: RunPlan) -> dict[str, list[str]]:
    """Return dataset -> a line for each faulty item, of this plan or of a job of an earlier build.

    Faults of jobs count while the item is as it was then, and is skipped or still to be encoded.
    """
    found: dict[str, list[str]] = {}
    for name in facts.config.runs[plan.name].datasets:
        parts = [state for part, state in plan.parts.items() if part.dataset == name]
        stale = {each.item.stem for state in parts for each in state.stale}
        skips = facts.config.datasets[name].on_error == "skip"
        lines = [fault.line for fault in plan.faults.get(name, ())]
        lines += [x["line"] for x in facts.noted(name) if skips or x["stem"] in stale]
        found[name] = [*dict.fromkeys(lines)]
    return found


def is_reg(facts: Facts, run: str) -> list[str]:
    """Return the datasets of a run's regularisation images, sorted."""
    config = facts.config
    return sorted(name for name in config.runs[run].datasets if config.datasets[name].is_reg)


def _data_differences(
    facts: Facts,
    plan: RunPlan,
    lock: Lock,
    texts: Mapping[str, Mapping[str, str]],
    repeats: Mapping[str, int],
    validation: int,
) -> list[Difference]:
    """Return what differs between a lock and the targets of today."""
    states = {
        f"{part.dataset}/{part.name}": plan.parts[part]
        for part in parts_of(facts.config, facts.config.runs[plan.name])
        if part.dataset != PROMPTS  # no manifest names them
    }
    found = stale_targets(states)
    if not lock.digest:
        return [*found, Difference(lock_fault(plan.name))]
    if lock.changed:
        found.append(Difference("the dataset's lock was changed"))
    # What is stale has been told, whatever its keys will be.
    keys = {part: x.keys or lock.parts.get(part) for part, x in states.items()}
    keys |= {part: keys_digest(each.items()) for part, each in texts.items() if each}
    parts = dict(lock.parts)
    for name in repeats:
        if f"{name}/{TEXTS}" in keys and parts.pop(f"{name}/{CAPTIONS}", ""):
            del keys[f"{name}/{TEXTS}"]
            what = "edited or saved again, and a lock of an earlier release cannot tell which"
            found.append(Difference(f"captions of {name} were {what}"))
    for was, now, name in (
        (parts, keys, "caches of {}"),
        (lock.repeats, repeats, "num_repeats of {}"),
        ({"items": len(lock.held_out)}, {"items": validation}, "validation.{}"),
        ({REGULARISATION: lock.is_reg}, {REGULARISATION: is_reg(facts, plan.name)}, "{}"),
    ):
        found += value_differences(was, now, name)
    return found


def _file_differences(facts: Facts, plan: RunPlan, lock: Lock) -> Iterator[Difference]:
    """Yield what differs in the manifest's bytes, the places of images, and the cache's files."""
    for name, places in plan.images.items():
        if lock.digest and lock.images.get(name) != places:
            yield Difference(f"images of {name} came, went or moved")
    manifest = run_folder(plan.name) / "manifest.jsonl"
    if lock.digest and lock.manifest != facts.digest_of(manifest):
        yield Difference(f"{manifest} is missing, or was changed")
    # Those of prompts wait for the next job.
    parts = (state for part, state in plan.parts.items() if part.dataset != PROMPTS)
    if orphans := sum(len(state.orphans) for state in parts):
        yield Difference(f"cache files without an item: {orphans}")


def stale_targets(states: Mapping[str, PartState]) -> list[Difference]:
    """Return a sentence for all targets of a dataset and kind that are stale for one reason."""
    stale, counts = Counter[tuple[str, str, str]](), Counter[tuple[str, str]]()
    for name, state in states.items():
        dataset, part = name.split("/", 1)
        kind = "texts" if parsed(part).kind == "text" else "latents"
        counts[dataset, kind] += state.fresh + len(state.stale)
        stale.update((dataset, kind, x.reason) for x in state.stale if x.reason != FORCED)
    return [
        Difference(f"{number} of {counts[dataset, kind]} {kind} of {dataset}: {reason}")
        for (dataset, kind, reason), number in stale.items()
    ]


def _skipped(facts: Facts, plan: RunPlan) -> _Skipped:
    """Return dataset -> faults of the items without caches."""
    found: _Skipped = {}
    for name in plan.images:
        faults, settings = plan.faults.get(name, []), facts.config.datasets[name]
        asked = {"dataset": name, "model": facts.config.runs[plan.name].model, "digest": ""}
        asked |= {"settings": settings_digest(settings)} if faults else {}
        said = (asked | {"stem": x.stem, "path": x.path, "line": x.line} for x in faults)
        found[name] = [*facts.skipped(name), *said]
    return {name: each for name, each in found.items() if each}


def _text_digests(facts: Facts, run: Run, name: str, lock: Lock) -> tuple[str, dict[str, str]]:
    """Return a part of the lock, and stem -> digest of texts that the trainer encodes itself.

    sd-scripts does so with Stable Diffusion 1.x and 2.x: no cache tells that a caption changed.
    A lock of a release before 0.3 has digests of caption files (`CAPTIONS`). They stay, where the
    memo or the file as it is can tell that the texts are the same.
    """
    part = f"{name}/{TEXTS}"
    if any(parsed(each).kind == "text" for each in part_names(facts.config, run, name)):
        return part, {}
    items = facts.wanted_items(name, run.model)
    contents = facts.judge(name, run.model, [], items, []).contents
    texts = {x.stem: x.texts or ([contents.text(x)] if x.caption else []) for x in items}
    if (known := lock.parts.get(f"{name}/{CAPTIONS}")) is not None:
        files = {x.stem: x.caption for x in items if x.texts is None and x.caption}
        then = facts.memo.sources.known([*files.values()])  # stat and digest, perhaps of before
        former = {stem: digest.of_value(each) if each else "" for stem, each in texts.items()}
        for stem, path in files.items():
            was = then.get(path, (None, ""))[1]
            same = was in former_digests(texts[stem][0])
            former[stem] = was if same else facts.digest_of(path) or "missing"
        if keys_digest(former.items()) == known:
            return f"{name}/{CAPTIONS}", former
    return part, {x: digest.of_value([*map(encoded, each)]) for x, each in texts.items()}


def members(
    facts: Facts,
    run: Run,
    known: Mapping[Part, Mapping[str, str]],
    texts: Mapping[str, Mapping[str, str]],
) -> Iterator[Member]:
    """Yield the items of a run with the names of their caches.

    `known` has the keys of targets by part and name (`Layout.identity`), `texts` the digests of
    texts that are not cached, by part of the lock and stem.
    """
    layout = facts.layout(run.model)
    for name in run.datasets:
        items, settings = facts.items(name, run.model)[0], facts.config.datasets[name]
        found: dict[str, dict[str, list[tuple[str, str | None]]]] = {x.stem: {} for x in items}
        for place in (Part(name, run.model, x) for x in part_names(facts.config, run, name)):
            keys = known.get(place, {})
            for item, targets in targets_of(layout, settings, place, items):
                named = ((each.path, layout.identity(item.stem, each.path)) for each in targets)
                found[item.stem][place.name] = [(path, keys.get(each)) for path, each in named]
        part, digests = next((x for x in texts.items() if x[0].startswith(f"{name}/")), ("", {}))
        for item in items:
            text = (part, digests[item.stem]) if item.stem in digests else None
            yield Member(name, item, found[item.stem], text)


def write_items(facts: Facts, name: str) -> Path:
    """Write the manifest of a publication without caches; raises DatasetError of faulty items."""
    config, run, fatal = facts.config, facts.config.runs[name], list[str]()
    without = set[tuple[str, str]]()
    for dataset in run.datasets:
        lines = [fault.line for fault in facts.items(dataset, run.model)[1]]
        if config.datasets[dataset].on_error == "skip":
            for noted in read_lock(name).aside.get(dataset, []):  # by earlier builds here
                if noted["digest"] and facts.is_unchanged(noted | {"dataset": dataset}, run.model):
                    lines.append(noted["line"])
                    without.add((dataset, noted["stem"]))
            sys.stderr.writelines(f"skipped: {line}\n" for line in lines)
        else:
            fatal += lines
    if fatal:
        named = joined(fatal, lambda line: sys.stderr.write(f"{line}\n"))
        fault, hint = f"{len(fatal)} faulty: {named}", "set on_error: skip to publish"
        raise DatasetError(fault, where=f"run {name}", hint=f"{hint} without these")
    repeats = {dataset: config.datasets[dataset].num_repeats for dataset in run.datasets}
    every, layout = members(facts, run, {}, {}), facts.layout(run.model)
    items = [each for each in every if (each.dataset, each.item.stem) not in without]
    if not items:
        raise DatasetError("no item is left to publish", where=f"run {name}")
    path = run_order(name, "items", time.time_ns()).with_suffix(".jsonl")
    if not facts.asks:
        atomic.write(path, lines_of(row_of(x, repeats[x.dataset], layout) for x in items))
    return path


def write_order(facts: Facts, run: str, kind: str, order: object) -> str:
    """Write a run's order of a kind, planned now, unless only asked; return its path."""
    path = run_order(run, kind, time.time_ns())
    if not facts.asks:
        atomic.write(path, to_json(order))
    return str(path)
