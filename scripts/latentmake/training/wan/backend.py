"""The trainer `wan` as a backend."""

from __future__ import annotations

from latentmake.plan.facts import Facts
from latentmake.plan.parts import RunPlan
from latentmake.training.loop.backend import LoopBackend
from latentmake.training.wan.order import WanOrder

__all__ = ["Wan"]


class Wan(LoopBackend):
    """The trainer `wan`."""

    def plan(self, facts: Facts, plan: RunPlan, *, train: bool) -> None:
        """Write the order of a run, and decide whether it is to be trained."""
        from latentmake.training.wan.plan import plan_training

        plan_training(facts, plan, train=train)

    def order_type(self) -> type[WanOrder]:
        """Return the class of its orders."""
        return WanOrder
