"""Encoding jobs: work orders that one process carries out, so that it loads their encoder once."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from latentmake import digest
from latentmake.plan.orders import WorkOrder


@dataclass(frozen=True)
class EncodingJob:
    """Work orders of one kind and model that one process carries out one after the other."""

    orders: tuple[WorkOrder, ...]

    @property
    def reuses(self) -> bool:
        """Whether all targets seem to be at hand, so that nothing has to be encoded."""
        return all(order.reuses for order in self.orders)

    @property
    def receipts(self) -> list[str]:
        """Paths of the receipts of its orders."""
        return [str(order.receipt) for order in self.orders]

    @property
    def rule(self) -> str:
        """Name of its rule."""
        verb = "reuse" if self.reuses else "encode"
        return f"{verb}_{self.orders[0].kind}_{self._subject}_{self._name}"

    @property
    def log(self) -> str:
        """Path of its log."""
        return f"logs/{self.orders[0].kind}/{self._subject}/{self._name}.log"

    @property
    def _subject(self) -> str:
        """Its dataset, or its model if there are several datasets."""
        datasets = {order.dataset for order in self.orders}
        return self.orders[0].model if len(datasets) > 1 else datasets.pop()

    @cached_property
    def _name(self) -> str:
        names = [order.name for order in self.orders]
        return (names[0] if len(names) == 1 else digest.of_value(names))[:12]


def jobs_of(
    wanted: Iterable[tuple[WorkOrder, Collection[str]]], side_by_side: int | None
) -> list[EncodingJob]:
    """Group work orders into jobs.

    Orders of a job are of one kind and model, and needed by the same runs, so that no run waits for
    what only others need. Those of an external encoder, which starts for each order, stay alone.

    Args:
        wanted: orders, each with the runs that need it.
        side_by_side: how many jobs run at a time on this machine; None on a cluster, where each
            order is a job.
    """
    groups: dict[object, list[WorkOrder]] = {}
    for order, runs in wanted:
        alone = side_by_side is None or order.is_external
        group = (order.name,) if alone else (order.shared_encoder, order.reuses, frozenset(runs))
        groups.setdefault(group, []).append(order)
    return [
        EncodingJob(tuple(dealt))
        for orders in groups.values()
        for dealt in _dealt(orders, side_by_side or 1)
    ]


def _dealt(orders: Sequence[WorkOrder], number: int) -> Iterator[list[WorkOrder]]:
    """Deal orders to a number of jobs that have about as many targets each.

    In a job the order of the largest samples comes first: it decides how much memory is needed.
    """
    jobs: list[list[WorkOrder]] = [[] for _ in range(min(number, len(orders)))]
    targets = [0] * len(jobs)
    for order in sorted(orders, key=lambda each: -len(each.paths)):
        least = targets.index(min(targets))
        jobs[least].append(order)
        targets[least] += len(order.paths)
    for job in jobs:
        yield sorted(job, key=lambda each: -each.largest)
