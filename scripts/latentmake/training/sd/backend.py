"""The trainer `sd` as a backend."""

from __future__ import annotations

from latentmake.plan.facts import Facts
from latentmake.plan.run_plan import RunPlan
from latentmake.training.loop.backend import LoopBackend
from latentmake.training.sd.order import SdOrder


class Sd(LoopBackend):
    """The trainer `sd`."""

    order_type = SdOrder

    def plan(self, facts: Facts, plan: RunPlan, *, train: bool) -> None:
        """Write the order of a run, and decide whether it is to be trained."""
        from latentmake.training.sd.plan import plan_training

        plan_training(facts, plan, train=train)
