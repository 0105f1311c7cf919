"""The trainer `wan` as a backend."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from latentmake.plan.facts import Facts
from latentmake.plan.reasons import Difference
from latentmake.plan.run_plan import RunPlan
from latentmake.training.checks import Finding, model_finding
from latentmake.training.loop.backend import LoopBackend
from latentmake.training.wan.order import WanOrder


class Wan(LoopBackend):
    """The trainer `wan`."""

    order_type = WanOrder

    def plan(self, facts: Facts, plan: RunPlan, *, train: bool) -> None:
        """Write the order of a run, and decide whether it is to be trained."""
        from latentmake.training.wan.plan import plan_training

        plan_training(facts, plan, train=train)

    def check(self, order: Any, *, current: bool) -> Iterable[Finding]:
        """Check the networks, and what the trainer's settings need."""
        from latentmake.plan.manifest import rows_of
        from latentmake.training.image_checks import image_findings
        from latentmake.training.wan.dit import trained_networks

        yield from map(model_finding, trained_networks(order))
        if current:  # the caches have musubi-tuner's pixels
            yield from image_findings(row.source for row in rows_of(Path(order.manifest)))
        yield from super().check(order, current=current)

    def plan_following(
        self, facts: Facts, plan: RunPlan, word: str
    ) -> tuple[Path, list[Difference]]:
        """Write the order of clips or of an evaluation; see `Backend.plan_following`."""
        from latentmake.training.wan.evaluation import plan_evaluation
        from latentmake.training.wan.generation import plan_generation

        return (plan_generation if word == "generate" else plan_evaluation)(facts, plan)

    def follow(self, order: Path, word: str, *, log: Path, threads: int = 2) -> Path:
        """Bring clips or the results of an evaluation up to date; return their folder."""
        from latentmake.training.wan.evaluation import launch

        return launch(order, word, log=log, threads=threads)
