"""Execution of orders: encode missing targets, then link targets of equal content.

All orders of a process have the same model, so the encoder is loaded once. Their samples go through
one pipeline, which does not run empty between two orders.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import partial

from latentmake.base import atomic
from latentmake.base.errors import DeviceError, SourceError, joined
from latentmake.base.machine import usable_cores
from latentmake.base.progress import Progress
from latentmake.data.texts import marked
from latentmake.encode import gpu
from latentmake.encode.job import ExternalEncoder, Job, Say
from latentmake.encode.pipeline import Pipeline
from latentmake.encode.reading import Loaded
from latentmake.plan.orders import Order, Work

Lease = Callable[[Say], AbstractContextManager[object]]

_READERS = 8  # threads that read and decode for a GPU, if the machine has as many cores
_DEFAULTS = {
    # OpenMP reads this when torch is imported. Threads that wait by spinning starve the readers.
    "OMP_WAIT_POLICY": "PASSIVE",
    # Batches of many shapes would fragment a GPU's memory.
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
}
_QUIET = {  # these libraries read it when they are imported
    "DIFFUSERS_VERBOSITY": "error",
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
}


def carry_out(
    orders: Iterable[Order],
    *,
    say: Say,
    threads: int = 1,
    load: Callable[[Order], Loaded] | None = None,
    external: Callable[[Order], ExternalEncoder | None] = lambda order: None,
    lease: Lease = contextlib.nullcontext,
) -> None:
    """Carry out the orders of a job and write their receipts.

    Args:
        orders: orders, read one by one, because all orders of a large dataset need much memory.
        say: function that shows a line: a fault or an outcome.
        threads: number of threads that encode on a CPU, and least number that read and decode.
        load: replacement of `load_encoder`.
        external: function that returns the encoder of another program, if an order uses one.
        lease: context that holds a GPU; entered once, when there is something to encode.

    Raises:
        DeviceError: the device is out of memory or in error. Finished files are kept, and the
            remaining orders are not carried out.
        SourceError: items were faulty and their datasets set `on_error: fail`. The error names all
            of them. All orders were carried out.
        ModelError: the model is missing or incomplete.
        StorageError: the disk is full or cannot be written.
    """
    # Before threads start: to add a variable while another thread reads one may crash (getenv).
    os.environ.update({**_DEFAULTS, **os.environ, **_QUIET})
    load = load or partial(load_encoder, threads=threads, say=say)
    # A GPU would wait for a single reader, so `--cores` does not limit the number of readers.
    readers = max(threads, min(_READERS, usable_cores())) if gpu.visible() else threads
    _Runner(say, threads, readers, load, external, lease).run(orders)


class _Runner:
    """State of `carry_out`, which explains the arguments.

    Attributes:
        held: context that holds the GPU, once it is needed.
        clock: time (time.monotonic) at which the present order began.
        has_encoded: whether an order that is finished has encoded something.
        faults: line per order whose items are faulty and not skipped.
    """

    def __init__(
        self,
        say: Say,
        threads: int,
        readers: int,
        load: Callable[[Order], Loaded],
        external: Callable[[Order], ExternalEncoder | None],
        lease: Lease,
    ) -> None:
        self.say, self.threads, self.readers = say, threads, readers
        self.external, self.lease = external, lease
        self.clock, self.faults = time.monotonic(), list[str]()
        self.has_gpu = self.has_encoded = False
        self.held = contextlib.ExitStack()
        self.progress = Progress(total=0, unit="target")
        self.pipeline = Pipeline(load, say, self.progress.update)
        self.progress.status = lambda: self.pipeline.bottleneck

    def run(self, orders: Iterable[Order]) -> None:
        """Carry out orders; raises SourceError if items were faulty."""
        job: Job | None = None
        jobs: deque[Job] = deque()
        with self.held, self.progress, self.pipeline:
            for order in orders:
                self.progress.total = (self.progress.total or 0) + len(order.paths)
                self.progress.set_description_str(f"{order.kind} of {order.dataset}", refresh=False)
                job = Job(order, self.say, self.take_gpu, job)
                jobs.append(job)
                self.make(job, order.items)
                while jobs and not jobs[0].waiting:
                    self.finish(jobs.popleft())
            self.pipeline.drain()
            for job in jobs:
                self.finish(job)
        if self.faults:
            hint = "fix these files and run the same command; all other items are finished"
            raise SourceError(joined(self.faults), hint=hint)

    def take_gpu(self) -> None:
        """Wait for a GPU, once in a process."""
        if self.has_gpu:
            return
        began = time.monotonic()
        self.held.enter_context(self.lease(self.say))
        self.has_gpu = True
        # The time spent waiting for other jobs must not count as start-up time of this one.
        self.clock += time.monotonic() - began

    def make(self, job: Job, works: Sequence[Work]) -> None:
        """Make the targets of items: by another program, or by the pipeline, which goes on."""
        if job.order.is_external and (encoder := self.external(job.order)):
            encoder(job, works, self.threads, self.progress)
        elif job.order.cuts_clips:
            from latentmake.encode.videos import make_clips  # imports OpenCV; few jobs need it

            make_clips(job, works, self.pipeline, self.readers, self.progress)
        else:
            for reading in job.readings(works, self.readers, self.progress):
                for sample in reading.samples:
                    self.pipeline.add(sample, job)

    def finish(self, job: Job) -> None:
        """Deliver the targets of a job, say its outcome, and leave its receipt or its faults."""
        # Items whose files another build has just deleted, and samples that were put off.
        while todo := job.deliver():
            self.make(job, todo)
            self.pipeline.drain()
        for line in marked(job.marked):
            self.say(line)
        for line in self.pipeline.loaded.remarks() if self.pipeline.loaded else ():
            self.say(line)
        self.say(job.outcome(self.pipeline.bottleneck))
        if job.failed and not job.order.skips:
            number = f"{len(job.failed)} of {len(job.order.items)} items are faulty: "
            self.faults.append(number + joined(job.failed.values()))
            # A job that fails writes no receipt.
            atomic.write(job.order.faults, json.dumps(job.faults).encode())
        else:
            now, starting = time.monotonic(), None if self.has_encoded else 0.0
            if job.loaded is not None and not self.has_encoded:
                starting, self.has_encoded = job.loaded - self.clock, True
            words, device = self.pipeline.bottleneck, gpu.device()
            job.leave_receipt(now - self.clock, starting, words, device)
        self.clock = time.monotonic()


def load_encoder(order: Order, threads: int, say: Say) -> Loaded:
    """Load the encoder of an order. This imports torch, so it runs when the first sample comes."""
    # Imports create many long-lived objects: the garbage collector would take a third of the time.
    gc.disable()
    try:
        from latentmake.encode.encoders import device
        from latentmake.encode.encoders.device import attempt

        loaded, message = attempt(device.encoder, order, threads=threads, say=say)
    finally:
        gc.enable()
    if loaded is None:
        what = f"not enough memory to load the encoders of {order.kind}: {message}"
        hint = "end other programs and run the same command again"
        raise DeviceError(what, where=f"models.{order.model}", hint=hint)
    return loaded
