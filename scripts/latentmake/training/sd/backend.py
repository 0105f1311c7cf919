"""The trainer `sd` as a backend."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from latentmake.plan.facts import Facts
from latentmake.plan.parts import RunPlan
from latentmake.training.backend import Backend
from latentmake.training.checks import Finding

__all__ = ["Sd"]


class Sd(Backend):
    """The trainer `sd`."""

    def plan(self, facts: Facts, plan: RunPlan, *, train: bool) -> None:
        """Write the order of a run, and decide whether it is to be trained."""
        from latentmake.training.sd.plan import plan_training

        plan_training(facts, plan, train=train)

    def check(self, order: Path, *, current: bool) -> Iterable[Finding]:
        """Check what the trainer's settings need."""
        from latentmake.training.order import TrainingOrder, read_order
        from latentmake.training.sd.checks import check_settings

        del current
        return check_settings(read_order(order, TrainingOrder).trainer)

    def train(
        self, order: Path, *, log: Path, receipt: Path, processes: int = 1, threads: int = 2
    ) -> None:
        """Bring the trained weights of an order up to date, and write the receipt."""
        from latentmake.training.sd.launch import train

        train(order, log=log, receipt=receipt, processes=processes, threads=threads)
