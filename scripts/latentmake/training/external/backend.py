"""Backend of an external trainer: a launched program with an environment of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

from latentmake.plan.facts import Facts
from latentmake.plan.run_plan import RunPlan
from latentmake.training.backend import Backend, Say
from latentmake.training.checks import Finding, failed, refuse_failed
from latentmake.training.external.order import ExternalOrder
from latentmake.training.external.result import RunFiles, reasons, wanted
from latentmake.training.external.resume import begun
from latentmake.training.external.trainer import Trainer

Order = TypeVar("Order", bound=ExternalOrder)


class External(Trainer[Order], Backend):
    """Backend that follows from a trainer's answers."""

    publishes = True

    def plan(self, facts: Facts, plan: RunPlan, *, train: bool) -> None:
        """Write the order of a run, and decide whether it is to be trained."""
        order = self.order(facts.config, plan.name)
        plan.trainer, plan.trainer_order = order, order.path
        if not facts.asks:
            order.write()

        def weights() -> str:
            return self.weights_digest(order, facts.memo.digest_of_file)

        if order.trained:
            found = [] if plan.lock else plan.outdated
            plan.reasons = [*found, *reasons(order, plan.lock, weights)]
        if plan.reasons:
            plan.note = _note(order, plan)
            if train:
                self.refuse(order, facts.memo)

    def check(self, order: Order, *, current: bool) -> Iterator[Finding]:
        """Check what a run needs besides its caches."""
        if current:
            yield from self.data_findings(order)
        if not order.trained:
            return
        found = [*self.preflight(order)]
        if failed(found) and not order.publish.caches:  # its models may lie on the other machine
            found = [*self.publication(order).findings()]
        yield from found

    def train(
        self, order: Path, *, log: Path, receipt: Path, processes: int = 1, threads: int = 2
    ) -> None:
        """Bring the trained weights of an order up to date, and write the receipt."""
        from latentmake.training.external.launch import train

        train(self, order, log=log, receipt=receipt, processes=processes, threads=threads)

    def check_publication(self, facts: Facts, run: str) -> None:
        """Refuse a publication whose files the trainer would refuse."""
        publication = self.publication(self.order(facts.config, run))
        refuse_failed(publication.findings(facts.memo))

    def publish(self, order: Path, say: Say) -> None:
        """Bring the published folder of an order up to date."""
        self.publication(self.read(order)).publish(say)

    def order_publication(self, facts: Facts, run: str, manifest: Path) -> Path:
        """Write the order of a publication of the items of another manifest than the run's."""
        order = self.order(facts.config, run)
        return order.model_copy(update={"manifest": str(manifest)}).write()


def _note(order: ExternalOrder, plan: RunPlan) -> str:
    """Return a line for the plan about the defaults that a training uses; "" where it uses none."""
    left = begun(RunFiles(order.run, order.output), order.run)
    if left and plan.lock and left == wanted(order, plan.lock, left.weights)[1][1]:
        return f"training of {order.run}: goes on with the defaults of the release that began it"
    return order.described()
