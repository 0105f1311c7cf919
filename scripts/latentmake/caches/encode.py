"""Carrying out orders: encode missing targets, then link those of equal content.

The encoder is loaded once for all orders of a job, which have the same model.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from functools import cache
from pathlib import Path
from types import MappingProxyType

from latentmake.caches.encoders import Loaded
from latentmake.caches.job import ExternalEncoder, Job, Say
from latentmake.caches.shortages import Shortages
from latentmake.errors import DeviceError, SourceError
from latentmake.plan.orders import Order
from latentmake.plan.receipts import Receipt
from latentmake.progress import Progress

Lease = Callable[[Say], AbstractContextManager[object]]
Load = Callable[[Order, int, Say, bool], Loaded]


def carry_out(
    order: Order,
    receipt: Path,
    *,
    say: Say,
    threads: int = 1,
    may_skip: bool = True,
    alone: bool = False,
    encoder: Loaded | ExternalEncoder | None = None,
    lease: Lease = contextlib.nullcontext,
    load: Load | None = None,
    before: Mapping[str, str] = MappingProxyType({}),
    shortages: Shortages | None = None,
) -> Receipt:
    """Carry out an order and leave its receipt.

    Args:
        order: to carry out.
        receipt: its path.
        say: told of faults and of the outcome, a line each.
        threads: that read and decode, and on a CPU encode.
        may_skip: whether the dataset's `on_error: skip` counts; not for a file asked for by name.
        alone: whether this process does nothing else.
        encoder: used instead of the model's own, or that, loaded for an order before.
        lease: holds a GPU; entered when there is something to encode, and not before.
        load: used instead of `load_encoder`.
        before: key -> file of what was made for orders before.
        shortages: of memory, for orders before.

    Raises:
        DeviceError: the device is out of memory or in error; what is finished is kept.
        SourceError: items were faulty and the dataset says `on_error: fail`; all are named.
        ModelError: the model is missing or incomplete.
        StorageError: the disk is full or cannot be written.
    """
    began, since = time.monotonic(), time.time()
    shortages = shortages or Shortages()
    job = Job(order, order.recipe, say, before=before, shortages=shortages)
    ready = [encoder] if isinstance(encoder, Loaded) else []
    started: list[float] = []
    held = contextlib.ExitStack()

    @cache
    def take_gpu() -> None:
        nonlocal began
        asked = time.monotonic()
        held.enter_context(lease(say))
        began += time.monotonic() - asked  # waiting for other jobs says nothing about this one

    job.take_gpu = take_gpu

    def loaded() -> Loaded:
        if not ready:
            take_gpu()
            ready.append((load or load_encoder)(order, threads, say, alone))
        if not started:
            started.append(time.monotonic() - began)
            job.stages.begin(ready[0].workers, ready[0].queues)
        return ready[0]

    name = f"{order.kind} of {order.dataset}"
    todo = list(order.items)
    total = sum(len(item.targets) for item in order.items)
    fails = not (may_skip and order.skips)
    counts = job.counts
    with held:
        with Progress(total=total, desc=name, unit="target") as progress:
            progress.status = lambda: job.stages.words
            while todo:
                if encoder is None or isinstance(encoder, Loaded):
                    job.make(todo, loaded, threads, progress)
                else:
                    encoder(job, todo, threads, progress)
                    if job.loaded is not None and not started:
                        started.append(job.loaded - began)
                todo = job.deliver()
        words = job.stages.words
        for line in ready[0].remarks() if ready else []:
            say(line)
        others = {"restored": counts["spooled"], "linked": counts["linked"]}
        others |= {"kept": counts["kept"], "faulty": len(job.failed)}
        further = "".join(f", {number} {word}" for word, number in others.items() if number)
        say(f"{name}: {counts['encoded']} encoded{further}{words and f'; {words}'}")
        if job.failed and fails:
            raise SourceError(
                f"{len(job.failed)} of {len(order.items)} items are faulty: "
                + " | ".join(job.failed.values()),
                hint="fix these files and run the same command; all other items are finished",
            )
    done = Receipt(
        sources=job.sources,
        targets=job.fresh,
        faults=job.faults,
        counts=counts,
        began=since,
        seconds=time.monotonic() - began,
        starting=None if isinstance(encoder, Loaded) else started[0] if started else 0.0,
        work=order.work if started else "",
        words=words,
    )
    done.write(receipt)
    return done


def carry_out_all(
    orders: Iterable[Order],
    *,
    say: Say,
    threads: int,
    may_skip: bool,
    encoder_of: Callable[[Order], Loaded | ExternalEncoder | None],
    lease: Lease,
) -> None:
    """Carry out the orders of a job one after the other, and leave their receipts.

    Args:
        orders: to carry out, read one by one: those of a large dataset are large together.
        say: told of faults and of the outcomes, a line each.
        threads: that read and decode, and on a CPU encode.
        may_skip: whether `on_error: skip` counts.
        encoder_of: returns what is used instead of an order's own encoder, if anything.
        lease: holds a GPU; entered once, when there is something to encode.

    Raises:
        DeviceError: the device is out of memory or in error; the orders that are left wait.
        SourceError: orders had faulty items; all are named, and all orders were carried out.
        ModelError: the model is missing or incomplete.
        StorageError: the disk is full or cannot be written.
    """
    loaded: list[Loaded] = []
    made: dict[str, str] = {}
    shortages = Shortages()
    faults: list[SourceError] = []

    def load(order: Order, threads: int, say: Say, alone: bool) -> Loaded:
        loaded.append(load_encoder(order, threads, say, alone))
        return loaded[0]

    with contextlib.ExitStack() as held:
        device = cache(lambda: held.enter_context(lease(say)))
        for order in orders:
            try:
                receipt = carry_out(
                    order,
                    order.receipt,
                    say=say,
                    threads=threads,
                    may_skip=may_skip,
                    alone=True,
                    encoder=loaded[0] if loaded else encoder_of(order),
                    lease=lambda _: contextlib.nullcontext(device()),
                    load=load,
                    before=made,
                    shortages=shortages,
                )
                made |= {str(values[-1]): path for path, values in receipt.targets.items()}
            except SourceError as error:
                faults.append(error)
    if faults:
        raise SourceError(" | ".join(each.what for each in faults), hint=faults[0].hint)


def load_encoder(order: Order, threads: int, say: Say, alone: bool) -> Loaded:
    """Load the encoder of an order; torch is imported here, and not before it has work."""
    # Imports make many objects that stay: the garbage collector would take a third of the time.
    gc.disable()
    try:
        from latentmake.caches.encoders import load
        from latentmake.caches.encoders.device import attempt

        found, words = attempt(load.encoder, order, threads=threads, say=say, alone=alone)
        if alone:
            gc.freeze()  # it never searches them
    finally:
        gc.enable()
    if found is None:
        raise DeviceError(
            f"not enough memory to load the encoders of {order.kind}: {words}",
            where=f"models.{order.model}",
            hint="end other programs and run the same command again",
        )
    return found
