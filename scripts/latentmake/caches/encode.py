"""Carries out a work order: encode what is not there, then give all targets their names.

They get them at the end, all together: until then a killed job has changed no cache file.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import cache
from pathlib import Path

from latentmake.caches.job import Encoder, ExternalEncoder, Job, Loaded, Sample, Say
from latentmake.errors import ModelError, SourceError
from latentmake.models import recipe
from latentmake.plan.orders import Receipt, WorkItem, WorkOrder
from latentmake.progress import Progress

__all__ = ["Encoder", "Sample", "carry_out"]

Lease = Callable[[Say], AbstractContextManager[object]]


def carry_out(
    order: WorkOrder,
    receipt: Path,
    *,
    say: Say,
    threads: int = 1,
    batch_size: int = 0,
    may_skip: bool = True,
    alone: bool = False,
    encoder: Encoder | None = None,
    external: ExternalEncoder | None = None,
    lease: Lease = contextlib.nullcontext,
) -> Receipt:
    """Carry out a work order and leave its receipt.

    Args:
        order: what to make.
        receipt: where the receipt goes.
        say: told of faults and of the outcome, a line each.
        threads: how many cores to use.
        batch_size: samples of one shape encoded at once; 0: one on a CPU, where the same source
            then gives the same bytes whatever lies beside it, more on a GPU.
        may_skip: whether the dataset's `on_error: skip` counts; not for a file asked for by name.
        alone: whether this process does nothing else.
        encoder: replaces the model's own.
        external: an external program's encoder, used instead of the model's own.
        lease: holds a GPU; entered when there is something to encode, and not before.

    Raises:
        SourceError: items were faulty and the dataset says `on_error: fail`; all are named.
        ModelError: the model is missing or incomplete.
        StorageError: the disk is full or cannot be written.
    """
    began, since = time.monotonic(), time.time()
    job = Job(order, order.recipe or _recipe(order), say)
    ready = [] if encoder is None else [Loaded(encoder, batch_size or 1)]

    started: list[float] = []
    held = contextlib.ExitStack()

    @cache
    def take_gpu() -> None:
        nonlocal began
        asked = time.monotonic()
        device = held.enter_context(lease(say))
        began += time.monotonic() - asked  # how long others had it says nothing of this job
        say(f"GPU: {device}" if isinstance(device, str) else "no GPU")

    def load() -> Loaded:
        if not ready:
            take_gpu()
            # Imports make a great many objects that stay: looking through them takes a tenth of it.
            gc.disable()
            try:
                ready.append(_load(order, threads, batch_size, say, alone))
            finally:
                gc.enable()
        if not started:
            started.append(time.monotonic() - began)
        return ready[0]

    name = f"{order.kind} of {order.dataset}"
    todo: Sequence[WorkItem] = order.items
    total = sum(len(item.targets) for item in order.items)
    fails = not (may_skip and order.skips)
    counts = job.counts
    with held:
        while todo:
            with Progress(total=total, desc=name, unit="target") as progress:
                while todo:
                    if external is None:
                        job.make(todo, load, threads=threads, progress=progress)
                    else:
                        if not order.reuses:
                            take_gpu()
                        external(job, todo, threads=threads, progress=progress)
                    todo = job.lost()
            for line in ready[0].remarks() if ready else []:
                say(line)
            say(
                f"{name}: {counts['encoded']} encoded, {counts['spooled']} taken from the spool, "
                f"{counts['linked']} linked to an equal one, {counts['kept']} kept, "
                f"{len(job.failed)} items faulty"
            )
            if job.failed and fails:
                raise SourceError(
                    f"{len(job.failed)} of {len(order.items)} items are faulty: "
                    + " | ".join(job.failed.values()),
                    mend="the others are done and kept; mend these and give the same command again",
                )
            todo = job.deliver()
    done = Receipt(
        sources=job.sources,
        targets=job.standing(),
        faults=job.faults,
        counts=counts,
        began=since,
        seconds=time.monotonic() - began,
        starting=started[0] if started else 0.0,
        work=order.work if started else "",
    )
    done.write(receipt)
    return done


def _recipe(order: WorkOrder) -> dict[str, object]:
    """Return the recipe of a model that had yet to be made when the order was written."""
    return recipe.make(order.kind, order.dataset_settings, order.model_settings)


def _load(order: WorkOrder, threads: int, batch_size: int, say: Say, alone: bool) -> Loaded:
    """Load the order's model; torch is imported here and not before there is work for it."""
    from latentmake.caches.encoders import load
    from latentmake.caches.encoders.device import within_memory

    loaded = within_memory(
        load.encoder, order, threads=threads, batch_size=batch_size, say=say, alone=alone
    )
    if loaded is not None:
        return loaded
    raise ModelError(
        f"memory does not suffice for the encoders of {order.kind}",
        where=f"models.{order.model}",
        mend="end other programs and give the same command again",
    )
