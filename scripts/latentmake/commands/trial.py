"""A trial: encode some items of each size, and train a few steps, to measure the time.

The encoded files go to the store, where the next build finds them.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import typer

from latentmake import backends
from latentmake.base.machine import usable_cores
from latentmake.commands.forecast import Times
from latentmake.commands.trial_training import trained
from latentmake.data.probe import sizes_of
from latentmake.encode.gpu import lease
from latentmake.encode.runner import carry_out
from latentmake.plan import store
from latentmake.plan.facts import Facts
from latentmake.plan.orders import PROMPTS, Order, Work
from latentmake.plan.receipts import learn_receipts, read_receipt
from latentmake.plan.run_plan import Plan


def tried(facts: Facts, plan: Plan, count: int) -> dict[str, Times]:
    """Encode `count` items of each size, train some steps, and return the times of a unit.

    The keys are kind and model of an encoder, and `training RUN`. The caller holds the lock of
    builds. Only Latentmake's own trainers train.
    """
    store.STORE.parent.mkdir(exist_ok=True)
    # On the disk of the store, so that files are moved there.
    with tempfile.TemporaryDirectory(prefix="trial-", dir=store.STORE.parent) as place:
        folder, places = Path(place), dict[str, str]()
        orders: dict[str, list[Order]] = {}
        for order in _orders(facts, plan.orders, count, folder, places):
            orders.setdefault(order.work, []).append(order)
        try:
            paces = {work: _encoded(several) for work, several in orders.items()}
            # A build's jobs are processes of their own: each imports what here the first one did.
            starting = max((pace.starting for pace in paces.values() if pace), default=0.0)
            paces = {
                work: pace and pace._replace(starting=starting) for work, pace in paces.items()
            }
            for name, run in plan.runs.items():
                paces[f"training {name}"] = trained(facts, run, folder / f"run-{name}", places)
        finally:
            learn_receipts(facts.memo)
            for order in chain(*orders.values()):
                if receipt := read_receipt(order.receipt):
                    for path, (*_, key) in receipt.targets.items():
                        store.put(Path(path), key)
            facts.memo.targets.forget(places.values())
    return {name: pace for name, pace in paces.items() if pace is not None}


# -- encoding -------------------------------------------------------------------------------------


def _encoded(orders: Sequence[Order]) -> Times | None:
    """Encode orders of one kind and model, and return the time of a pixel, or of a text.

    It follows from the times between finished files.
    """
    carry_out(
        orders,
        say=partial(typer.echo, err=True),
        threads=usable_cores(),
        external=backends.encoder_of,
        lease=lease,
    )
    finished, starting = dict[int, float](), 0.0
    for order in orders:
        amounts = {target.path: target.pixels or 1 for target in order.targets}
        if receipt := read_receipt(order.receipt):
            starting += receipt.starting or 0.0
            for path, (_, moment, *_) in receipt.targets.items():
                finished[moment] = finished.get(moment, 0.0) + amounts[path]
    moments = sorted(finished.items())
    paces = [(after - before) / 1e9 / amount for (before, _), (after, amount) in pairwise(moments)]
    if not paces:
        return None
    basis = f"a trial of {len(moments)} files"
    return Times.mean(paces, [amount for _, amount in moments[1:]], basis, starting)


def _orders(
    facts: Facts, orders: Sequence[Order], count: int, folder: Path, places: dict[str, str]
) -> Iterator[Order]:
    """Yield the orders of a trial, which write into a folder; `places` gets path -> new path."""
    several = [order for order in orders if not order.reuses and order.dataset != PROMPTS]
    chosen = _chosen(facts, several, count)
    for order in several:
        items = []
        for work in order.items:
            if work.item.stem in chosen[order.dataset]:
                targets = tuple(
                    target._replace(path=str(folder / target.path), found=None, at_hand=())
                    for target in work.targets
                )
                pairs = zip(work.targets, targets, strict=True)
                places |= {target.path: new.path for target, new in pairs}
                items.append(work._replace(targets=targets))
        if items:
            yield replace(order, items=tuple(items), forced=False)


def _chosen(facts: Facts, orders: Sequence[Order], count: int) -> dict[str, set[str]]:
    """Return dataset -> stems of `count` items of each size and length.

    If only texts are encoded, they are `count` texts of each dataset.
    """
    chosen, seen = dict[str, set[str]](), Counter[object]()
    for order in sorted(orders, key=lambda order: order.kind):
        stems = chosen.setdefault(order.dataset, set())
        if order.kind == "text":
            stems.update(work.item.stem for work in order.items[: 0 if stems else count])
            continue
        sizes = sizes_of((work.item for work in order.items), facts.memo)
        for work in order.items:
            shapes = [*_shapes(order, work, sizes)]
            seen[order.dataset, *shapes] += 1
            if seen[order.dataset, *shapes] <= count:
                stems.add(work.item.stem)
    return chosen


def _shapes(order: Order, work: Work, sizes: Mapping[str, Any]) -> Iterator[object]:
    """Yield the size and the number of frames of each target of an item."""
    for target in work.targets:
        assert target.size is not None
        image = sizes.get(work.item.stem, target.size)
        size = order.layout.size(image, target.size, order.dataset_settings)
        yield size, target.clip and target.clip.frames
