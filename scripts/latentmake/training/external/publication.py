"""Items of a publication that encodes nothing.

With `publish: {caches: false}` the items of a run come from its datasets alone: no recipe is asked
for, so that the model's encoders need not lie on this machine.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from latentmake.errors import DatasetError
from latentmake.files import atomic
from latentmake.plan.facts import Facts
from latentmake.plan.lock import read_lock
from latentmake.plan.manifest import lines_of, row_of
from latentmake.plan.orders import run_order
from latentmake.plan.run_plan import members


def write_items(facts: Facts, name: str) -> Path:
    """Write the manifest of a publication without caches, a JSONL file; return its path.

    Raises:
        DatasetError: a dataset is missing, holds no image, or has faulty items and does not skip
            them.
    """
    config, run = facts.config, facts.config.runs[name]
    without = _left_out(facts, name)
    layout = facts.layout(run.model)
    rows = [
        row_of(each, config.datasets[each.dataset].num_repeats, layout)
        for each in members(facts, run, {}, {})
        if (each.dataset, each.item.stem) not in without
    ]
    if not rows:
        raise DatasetError("no item is left to publish", where=f"run {name}")
    items = run_order(name, "items", time.time_ns()).with_suffix(".jsonl")
    atomic.write(items, lines_of(rows))
    return items


def _left_out(facts: Facts, name: str) -> set[tuple[str, str]]:
    """Return dataset and stem of the items that cannot be published, each of which is told.

    Besides those that a listing tells, earlier builds here skipped what they could not read.
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
            sys.stderr.writelines(f"skipped: {line}\n" for _, line in faults)
        else:
            lines += [line for _, line in faults]
    if lines:
        raise DatasetError(
            f"{len(lines)} faulty: {' | '.join(lines)}",
            where=f"run {name}",
            hint="set on_error: skip to publish without these",
        )
    return found
