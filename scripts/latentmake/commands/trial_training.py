"""The training of a trial: a few steps in a folder of its own."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from latentmake import backends
from latentmake.base import atomic
from latentmake.commands.forecast import Times
from latentmake.plan.facts import Facts
from latentmake.plan.run_plan import RunPlan, members
from latentmake.runs.order import Record
from latentmake.runs.rows import lines_of, row_of

_STEPS = 5
_RATES = ("images_per_second", "items_per_second")  # names of a scalar


def trained(facts: Facts, plan: RunPlan, folder: Path, places: Mapping[str, str]) -> Times | None:
    """Train a run for some steps in a folder; return the time of a step, None without a trainer.

    It trains on the items whose caches are fresh or in `places`, which has path -> path of a file
    of the trial.
    """
    backend = backends.of_run(facts.config, plan.name)
    if backend is None or plan.training_order is None:
        return None
    order = backend.trial(plan.trainer, folder, _STEPS)
    if order is None or not (rows := [*_rows(facts, plan, places)]):
        return None
    atomic.write(Path(order.manifest), lines_of(rows))
    atomic.write(Path(order.lock), b'{"digest": "trial"}')
    path = order.write()
    try:
        backend.train(path, log=folder / "log", receipt=folder / "receipt.json")
    finally:
        path.unlink(missing_ok=True)
    return _pace(folder)


def _rows(facts: Facts, plan: RunPlan, places: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """Yield the rows of the manifest of a trial.

    They are repeated, so that the datasets have the same shares as in the training, and
    batches are full.
    """
    run, config = facts.config.runs[plan.name], facts.config
    keys = {part: state.keys_by_name() for part, state in plan.parts.items()}
    every, several = [*members(facts, run, keys, {})], []
    for member in every:
        targets = member.targets.items()
        if all(key or path in places for _, pairs in targets for path, key in pairs):
            moved = {
                part: [(places.get(path, path), key) for path, key in pairs]
                for part, pairs in targets
            }
            several.append(member._replace(targets=moved))
    total, used = (Counter(member.dataset for member in some) for some in (every, several))
    for member in several:
        share = config.datasets[member.dataset].num_repeats * total[member.dataset]
        repeats = math.ceil(share / used[member.dataset])
        yield row_of(member, repeats, facts.layout(run.model))


def _pace(folder: Path) -> Times | None:
    """Return the time of a step of a finished training, without the first one, which warms up."""
    from latentmake.pages.curves import read_curves

    record, curves = Record.read(folder / "training.json"), read_curves(folder / "logs")
    rates = [curves[name] for name in _RATES if name in curves]
    seconds = [1 / rate for rate in rates[0][1].tolist()] if rates else []
    if record is None or len(seconds) < 2:
        return None
    unit = record.seconds / sum(seconds)  # items of a step
    paces = [unit * value for value in seconds[1:]]
    return Times.mean(paces, [1.0] * len(paces), f"a trial of {len(paces)} steps")
