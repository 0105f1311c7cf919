"""Estimates by past jobs of the same kind and model: time, bytes, batches, limits on a cluster."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import NamedTuple, TypeVar

from latentmake.config.machines import Cluster, TrainingJob
from latentmake.files.disk import Need, human
from latentmake.index.memo import Memo
from latentmake.plan.orders import Order
from latentmake.progress import duration

Resources = dict[str, int | str | Callable[[object, int], int]]
_Group = TypeVar("_Group", bound=Hashable)
_UNKNOWN_SECONDS, _UNKNOWN_ITEMS = 2.0, 1024  # of an item, and in a batch, without past jobs


class Past(NamedTuple):
    """Sums over past jobs of one kind and model; each job counts twice as much as the one before.

    Attributes:
        targets: cache files that were encoded, or linked to an equal one.
        seconds: from the first encoded item to the end.
        size: bytes of the files, of several names of one file once.
        starting: seconds from the start of the last job to its first encoded item.
        words: on the bottleneck of the last job that was not short.
    """

    targets: float = 0.0
    seconds: float = 0.0
    size: float = 0.0
    starting: float = 0.0
    words: str = ""

    def time(self, targets: float) -> float:
        """Return the seconds that some targets take in a job that has started."""
        return targets * self.seconds / (self.targets or 1)


def past_jobs(memo: Memo, work: str) -> Past | None:
    """Return what past jobs of a kind and model tell; None where none has run here."""
    try:
        return Past(**json.loads(memo.rates.get(work) or "[]"))
    except (TypeError, ValueError):  # none, or in the form of a former version
        return None


def learn_job(memo: Memo, work: str, job: Past) -> None:
    """Remember a job of a kind and model; one without targets counts for nothing."""
    if job.targets > 0 and job.seconds > 0:
        old = past_jobs(memo, work) or Past()
        new = Past(
            old.targets / 2 + job.targets,
            old.seconds / 2 + job.seconds,
            old.size / 2 + job.size,
            job.starting or old.starting,
            job.words or old.words,
        )
        memo.rates.learn(work, None, json.dumps(new._asdict()))


def batch_items(memo: Memo, work: str, minutes: float, targets: float) -> int:
    """Return how many items of some targets each past jobs of a kind and model encoded in minutes.

    Starting a job shall be a tenth of it at most, however short the time asked for.
    """
    past = past_jobs(memo, work)
    if past is None:
        return _UNKNOWN_ITEMS
    seconds = max(minutes * 60 - past.starting, 9 * past.starting)
    return max(1, int(seconds / past.time(targets)))


class Estimate(NamedTuple):
    """Cache files to be encoded: number, bytes, seconds in a job that has started; unknown is 0."""

    number: int = 0
    size: float = 0.0
    seconds: float = 0.0


def estimates(
    memo: Memo, orders: Iterable[Order], group: Callable[[Order, str], _Group]
) -> dict[_Group, Estimate]:
    """Return the estimates of some orders' targets, in groups by order and part."""
    found: dict[_Group, Estimate] = {}
    for order in (each for each in orders if not each.reuses):
        past = past_jobs(memo, order.work) or Past()
        parts = Counter(target.part for item in order.items for target in item.targets)
        for part, number in parts.items():
            old = found.get(name := group(order, part), Estimate())
            size = old.size + number * past.size / (past.targets or 1)
            found[name] = Estimate(old.number + number, size, old.seconds + past.time(number))
    return found


def lines(memo: Memo, orders: Iterable[Order]) -> Iterator[str]:
    """Yield a line for each kind and model of which past jobs tell anything."""
    for work, (_, size, seconds) in estimates(memo, orders, lambda x, _: x.work).items():
        if past := past_jobs(memo, work):
            time = duration((past.starting + seconds) / 60)
            yield f"{work.replace(' ', ' of ')}: about {time}, {human(size)}"


def needs(memo: Memo, orders: Iterable[Order]) -> list[Need]:
    """Return the room that some orders need, as far as it is known."""
    found = estimates(memo, orders, lambda order, _: f"{order.kind} of {order.model}")
    return [Need(what, "cache", round(each.size)) for what, each in found.items() if each.size]


def resources_of(
    cluster: Cluster, kind: str, orders: Sequence[Order], memo: Memo | None
) -> Resources:
    """Return the cluster resources of a job of a kind (`encode`, `train`) with some orders.

    `memo` knows past jobs; None in a process that does not plan.
    """
    asked = cluster.encode if kind == "encode" else cluster.train
    past = past_jobs(memo, orders[0].work) if memo is not None and orders else None
    seconds = _UNKNOWN_SECONDS * max(1, sum(len(order.items) for order in orders))
    if past is not None:
        seconds = past.starting + past.time(sum(len(order.paths) for order in orders))
    limit = asked.runtime + (2 * seconds / 60 if kind == "encode" else 0)
    found: Resources = {
        "mem_mb": lambda wildcards, attempt: int(asked.mem_mb * (1 + (attempt - 1) / 2)),
        "runtime": lambda wildcards, attempt: math.ceil(limit * attempt),
    }
    if isinstance(asked, TrainingJob) and asked.nodes > 1:
        found["nodes"] = asked.nodes
    slurm = {"partition": asked.partition or cluster.partition, "account": cluster.account}
    return found | {f"slurm_{name}": value for name, value in slurm.items() if value}
