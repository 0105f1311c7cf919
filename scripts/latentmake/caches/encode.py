"""Carrying out orders: encode missing targets, then link those of equal content.

The encoder is loaded once for all orders of a process, which have the same model, and the samples
of all go through one pipeline: it never runs empty between two orders.
"""

from __future__ import annotations

import contextlib
import gc
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import cache, partial

from latentmake.caches.inputs import Loaded
from latentmake.caches.job import ExternalEncoder, Job, Say
from latentmake.caches.pipeline import Pipeline
from latentmake.data.texts import marked
from latentmake.errors import DeviceError, SourceError, joined
from latentmake.plan.orders import Order, Work
from latentmake.progress import Progress

Lease = Callable[[Say], AbstractContextManager[object]]


def carry_out(
    orders: Iterable[Order],
    *,
    say: Say,
    threads: int = 1,
    readers: int = 1,
    load: Callable[[Order], Loaded] | None = None,
    external: Callable[[Order], ExternalEncoder | None] = lambda order: None,
    lease: Lease = contextlib.nullcontext,
) -> None:
    """Carry out the orders of a job, and leave their receipts.

    Args:
        orders: to carry out, read one by one: those of a large dataset are large together.
        say: told of faults and of the outcomes, a line each.
        threads: that encode on a CPU, and read and decode.
        readers: threads that read and decode, if these are more.
        load: used instead of `load_encoder`.
        external: returns what another program makes targets by, if an order asks for that.
        lease: holds a GPU; entered once, when there is something to encode.

    Raises:
        DeviceError: the device is out of memory or in error; what is finished is kept, and the
            orders that are left wait.
        SourceError: items were faulty and their datasets say `on_error: fail`; all are named, and
            all orders were carried out.
        ModelError: the model is missing or incomplete.
        StorageError: the disk is full or cannot be written.
    """
    # Before torch is imported: threads that wait by spinning starve those that read.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    clock, has_encoded, faults = time.monotonic(), False, list[str]()
    readers = max(threads, readers)
    loads = load or partial(load_encoder, threads=threads, say=say)

    @cache
    def take_gpu() -> None:
        nonlocal clock
        asked = time.monotonic()
        held.enter_context(lease(say))
        clock += time.monotonic() - asked  # waiting for other jobs says nothing about this one

    def make(job: Job, works: Sequence[Work]) -> None:
        if job.order.is_external and (encoder := external(job.order)):
            encoder(job, works, threads, progress)
        elif job.order.cuts_clips:
            from latentmake.caches.clips import make_clips  # which few jobs need

            make_clips(job, works, pipeline, readers, progress)
        else:
            for reading in job.readings(works, readers, progress):
                for sample in reading.samples:
                    pipeline.add(sample, job)

    def finish(job: Job) -> None:
        nonlocal clock, has_encoded
        while todo := job.deliver():
            make(job, todo)
            pipeline.drain()
        for line in marked(job.marked):
            say(line)
        for line in pipeline.loaded.remarks() if pipeline.loaded else ():
            say(line)
        say(job.outcome(pipeline.words))
        if job.failed and not job.order.skips:
            number = f"{len(job.failed)} of {len(job.order.items)} items are faulty: "
            faults.append(number + joined(job.failed.values()))
            job.leave_faults()
        else:
            now, starting = time.monotonic(), None if has_encoded else 0.0
            if job.loaded is not None and not has_encoded:
                starting, has_encoded = job.loaded - clock, True
            job.leave_receipt(now - clock, starting, pipeline.words)
        clock = time.monotonic()

    job: Job | None = None
    jobs: deque[Job] = deque()
    with (
        contextlib.ExitStack() as held,
        Progress(total=0, unit="target") as progress,
        Pipeline(loads, say, progress.update) as pipeline,
    ):
        progress.status = lambda: pipeline.words
        for order in orders:
            progress.total = (progress.total or 0) + len(order.paths)
            progress.set_description(f"{order.kind} of {order.dataset}", refresh=False)
            job = Job(order, say, take_gpu, job)
            jobs.append(job)
            make(job, order.items)
            while jobs and not jobs[0].waiting:
                finish(jobs.popleft())
        pipeline.drain()
        for job in jobs:
            finish(job)
    if faults:
        hint = "fix these files and run the same command; all other items are finished"
        raise SourceError(joined(faults), hint=hint)


def load_encoder(order: Order, threads: int, say: Say) -> Loaded:
    """Load the encoder of an order; torch is imported here, and not before it has work."""
    # Batches of many shapes would leave holes in a GPU's memory.
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    # Imports make many objects that stay: the garbage collector would take a third of the time.
    gc.disable()
    try:
        from latentmake.caches.encoders import device
        from latentmake.caches.encoders.device import attempt

        found, words = attempt(device.encoder, order, threads=threads, say=say)
    finally:
        gc.enable()
    if found is None:
        what = f"not enough memory to load the encoders of {order.kind}: {words}"
        hint = "end other programs and run the same command again"
        raise DeviceError(what, where=f"models.{order.model}", hint=hint)
    return found
