"""Past jobs: their time and size, and what follows from them for batches and cluster jobs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, NamedTuple

from pydantic import Field, TypeAdapter

from latentmake.config.machines import Cluster, Resources
from latentmake.data.memo import Memo
from latentmake.plan.orders import Order

# Without past jobs: seconds that an item takes, and items of a batch.
_UNKNOWN_SECONDS, _UNKNOWN_ITEMS = 2.0, 1024

Amount = Annotated[float, Field(ge=0, le=1e18)]  # a larger value means damage, and would overflow


class Past(NamedTuple):
    """Sums over past jobs of a kind and model; a job counts twice as much as the one before it."""

    targets: Amount = 0.0  # cache files that were encoded, or linked to an equal one
    seconds: Amount = 0.0  # from the first encoded item to the end
    size: Amount = 0.0  # bytes of the files; a file with several names counts once
    starting: Amount = 0.0  # seconds from the start of the last job to its first encoded item
    words: str = ""  # text on the bottleneck of the last job that was not short
    pixels: Amount = 0.0  # pixels of the files; 0 for texts and for jobs of releases before 0.4
    device: str = ""  # device and dtype of the jobs: `cpu float32`; "" before release 0.5
    jobs: Amount = 0.0  # number of the jobs

    def time(self, targets: float) -> float:
        """Return the seconds that a number of targets takes, without the start of the job."""
        return targets * self.seconds / (self.targets or 1)


_PAST = TypeAdapter(Past).validate_json


def past_jobs(memo: Memo, work: str) -> Past | None:
    """Return the sums over past jobs of a kind and model; None if none has run here."""
    try:
        return _PAST(memo.rates.get(work) or "")
    except ValueError:  # missing, or in the form of an earlier release
        return None


def learn_job(memo: Memo, work: str, job: Past) -> None:
    """Remember a job of a kind and model; ignore it if it encoded no targets.

    The sums begin anew with another device or dtype.
    """
    if job.targets > 0 and job.seconds > 0:
        old = past_jobs(memo, work) or Past()
        if old.device != job.device:
            old = Past()
        new = Past(
            old.targets / 2 + job.targets,
            old.seconds / 2 + job.seconds,
            old.size / 2 + job.size,
            job.starting or old.starting,
            job.words or old.words,
            (old.pixels or old.targets * job.pixels / job.targets) / 2 + job.pixels,
            job.device,
            old.jobs + 1,
        )
        memo.rates.learn(work, None, json.dumps(new._asdict()))


def batch_items(memo: Memo, work: str, minutes: float, targets: float) -> int:
    """Return the number of items that a job of a kind and model encodes in some minutes.

    `targets` is the number of targets per item. A batch is at least so long that starting the job
    takes at most a tenth of its time.
    """
    past = past_jobs(memo, work)
    if past is None:
        return _UNKNOWN_ITEMS
    seconds = max(minutes * 60 - past.starting, 9 * past.starting)
    return max(1, int(seconds / past.time(targets)))


def resources_of(
    cluster: Cluster, kind: str, orders: Sequence[Order], memo: Memo | None
) -> Resources:
    """Return the cluster resources of a job of a kind (`encode`, `train`) with some orders.

    `memo` has the sums over past jobs; None in a process that does not plan.
    """
    past = past_jobs(memo, orders[0].work) if memo is not None and orders else None
    seconds = _UNKNOWN_SECONDS * max(1, sum(len(order.items) for order in orders))
    if past is not None:
        seconds = past.starting + past.time(sum(len(order.paths) for order in orders))
    return cluster.resources(kind, seconds if kind == "encode" else 0.0)
