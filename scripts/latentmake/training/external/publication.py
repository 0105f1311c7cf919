"""Orders of publications, and the publication that encodes nothing.

With `publish: {caches: false}` the items of a run come from its datasets alone: no recipe is asked
for, so that the model's encoders need not lie on this machine.
"""

from __future__ import annotations

import sys
from pathlib import Path

from latentmake.config import Config, SdScriptsTrainer
from latentmake.errors import DatasetError
from latentmake.files import atomic
from latentmake.plan.facts import Facts
from latentmake.plan.manifest import lines_of, row_of
from latentmake.plan.manifest_job import manifest_items
from latentmake.plan.orders import run_order
from latentmake.plan.parts import read_lock
from latentmake.training.checks import refuse_failed
from latentmake.training.external.musubi.order import MusubiOrder
from latentmake.training.external.musubi.plan import wan_order
from latentmake.training.external.sdscripts.order import SdScriptsOrder
from latentmake.training.external.sdscripts.plan import sdscripts_order

__all__ = ["check_publication", "is_uncached", "plan_publication"]


def is_uncached(target: str, config: Config) -> bool:
    """Tell whether a target is the publication of a run without its caches."""
    word, _, name = target.partition("_")
    return word == "publish" and name in config.runs and not config.publish.caches


def plan_publication(facts: Facts, name: str) -> Path:
    """Write the order of a run's publication without caches, and the items that it publishes.

    Args:
        facts: of its datasets.
        name: the run.

    Raises:
        DatasetError: a dataset is missing, holds no image, or has faulty items and is not to skip
            them.
        StorageError: the disk is full or cannot be written.
    """
    config, run = facts.config, facts.config.runs[name]
    kind, order = _order(config, name)
    without = _left_out(facts, name)
    layout = facts.layout(run.model)
    rows = [
        row_of(
            item,
            {part: [path for path, _ in targets] for part, targets in item.targets.items()},
            config.datasets[item.dataset].num_repeats,
            layout,
        )
        for item in manifest_items(facts, run, {}, {})
        if (item.dataset, item.stem) not in without
    ]
    if not rows:
        raise DatasetError("no item is left to publish", where=f"run {name}")
    items = run_order(name, "items", order.planned).with_suffix(".jsonl")
    atomic.write(items, lines_of(rows))
    path = run_order(name, kind, order.planned)
    changed = order.model_copy(update={"manifest": str(items)})
    atomic.write(path, changed.model_dump_json().encode())
    facts.memo.save()
    return path


def check_publication(facts: Facts, name: str) -> None:
    """Refuse a publication whose files its trainer would refuse, before anything is encoded.

    Args:
        facts: with what is remembered of its trainer.
        name: the run.

    Raises:
        ConfigError: the configuration says too little for a publication.
        TrainingError: names the findings that have failed.
    """
    from latentmake.training.external.musubi import publish as musubi
    from latentmake.training.external.sdscripts import publish as sdscripts

    order = _order(facts.config, name)[1]
    if isinstance(order, MusubiOrder):
        refuse_failed(musubi.findings(order, facts.memo))
    else:
        refuse_failed(sdscripts.findings(order, facts.memo))


def _order(config: Config, name: str) -> tuple[str, SdScriptsOrder | MusubiOrder]:
    """Return the kind of a run's order, and the order."""
    trainer = config.runs[name].trainer
    if isinstance(trainer, SdScriptsTrainer):
        return "sdscripts", sdscripts_order(config, name, trainer)
    return "wan", wan_order(config, name)


def _left_out(facts: Facts, name: str) -> set[tuple[str, str]]:
    """Return dataset and stem of the items that cannot be published, each of which is told.

    Besides those that a listing tells, earlier builds here set aside what they could not read.
    """
    config, run = facts.config, facts.config.runs[name]
    found: set[tuple[str, str]] = set()
    lines: list[str] = []
    for dataset in run.datasets:
        skip = config.datasets[dataset].on_error == "skip"
        faults = [(fault.stem, fault.line) for fault in facts.items(dataset, run.model)[1]]
        for noted in read_lock(name).aside.get(dataset, []) if skip else []:
            if noted["digest"] and facts.digest_of(noted["path"]) == noted["digest"]:
                faults.append((noted["stem"], noted["line"]))
        found |= {(dataset, stem) for stem, _ in faults}
        if skip:
            sys.stderr.writelines(f"set aside: {line}\n" for _, line in faults)
        else:
            lines += [line for _, line in faults]
    if lines:
        raise DatasetError(
            f"{len(lines)} faulty: {' | '.join(lines)}",
            where=f"run {name}",
            mend="set on_error: skip to publish without these",
        )
    return found
