"""Resources that a job asks of a cluster."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from latentmake.config.machines import Cluster, TrainingJob
from latentmake.index.memo import Memo
from latentmake.plan.batches import minutes_of
from latentmake.plan.orders import WorkOrder

Resources = dict[str, int | str | Callable[[object, int], int]]
_UNKNOWN_SECONDS = 2.0  # an item of a model without any measured speed


def resources_of(
    cluster: Cluster, kind: str, orders: Sequence[WorkOrder], memo: Memo | None
) -> Resources:
    """Return the cluster resources of a job of a kind (`encode`, `train`) with some work orders.

    `memo` knows the speed of past jobs; None in a process that does not plan.
    """
    asked = cluster.encode if kind == "encode" else cluster.train
    minutes = 0.0 if orders else _UNKNOWN_SECONDS / 60
    for number, order in enumerate(orders):
        known = minutes_of(memo, order, starts=not number) if memo else None
        minutes += len(order.items) * _UNKNOWN_SECONDS / 60 if known is None else known
    limit = asked.runtime + (2 * minutes if kind == "encode" else 0)
    found: Resources = {
        "mem_mb": lambda wildcards, attempt: int(asked.mem_mb * (1 + (attempt - 1) / 2)),
        "runtime": lambda wildcards, attempt: math.ceil(limit * attempt),
    }
    if isinstance(asked, TrainingJob) and asked.nodes > 1:
        found["nodes"] = asked.nodes
    if partition := asked.partition or cluster.partition:
        found["slurm_partition"] = partition
    if cluster.account:
        found["slurm_account"] = cluster.account
    return found
