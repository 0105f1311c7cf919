"""Backend of an external trainer: plan, checklist and publication from its own order."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

from latentmake.config import Config
from latentmake.index.remembered import Memory
from latentmake.plan.facts import Facts
from latentmake.plan.parts import RunPlan
from latentmake.training.backend import Backend
from latentmake.training.checks import Finding, refuse_failed
from latentmake.training.external.order import ExternalOrder
from latentmake.training.external.result import is_trained
from latentmake.training.order import read_order

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["External"]

_Order = TypeVar("_Order", bound=ExternalOrder)


class External(Backend, Generic[_Order]):
    """An external trainer.

    Attributes:
        order_type: class of its orders.
    """

    publishes = True
    order_type: type[_Order]

    @abstractmethod
    def order(self, config: Config, run: str) -> _Order:
        """Return the order of a run."""

    @abstractmethod
    def weights_digest(self, order: _Order, file_digest: Callable[[Path], str]) -> str:
        """Return the digest of the networks that are trained.

        Raises:
            ModelError: one is missing or cannot be read.
        """

    @abstractmethod
    def refuse(self, order: _Order, memory: Memory) -> None:
        """Refuse a training that lacks something, before its caches are made.

        Raises:
            ModelError: a network to be trained is missing, or another.
            TrainingError: the trainer, its environment or the settings do not fit.
        """

    @abstractmethod
    def publication_findings(self, order: _Order, memory: Memory) -> Iterable[Finding]:
        """Check what would be published.

        Raises:
            ConfigError: the configuration says too little for a publication.
        """

    def is_asked(self, order: _Order) -> bool:
        """Whether the run has a trainer; without one it can be published alone."""
        del order
        return True

    def read(self, order: Path) -> _Order:
        """Read an order file.

        Raises:
            TrainingError: it is missing, or not an order.
        """
        return read_order(order, self.order_type)

    def plan(self, facts: Facts, plan: RunPlan, *, train: bool) -> None:
        """Write the order of a run, and decide whether it is to be trained."""
        order = self.order(facts.config, plan.name)
        plan.trainer_order = order.write()

        def weights() -> str:
            return self.weights_digest(order, facts.memo.digest_of_file)

        if self.is_asked(order) and not (plan.lock and is_trained(order, plan.lock, weights)):
            plan.training_order = plan.trainer_order
            if train:
                self.refuse(order, facts.memo)

    def check_publication(self, facts: Facts, run: str) -> None:
        """Refuse a publication whose files the trainer would refuse."""
        refuse_failed(self.publication_findings(self.order(facts.config, run), facts.memo))

    def order_publication(self, facts: Facts, run: str, manifest: Path) -> Path:
        """Write the order of a publication of the items of another manifest than the run's."""
        order = self.order(facts.config, run)
        return order.model_copy(update={"manifest": str(manifest)}).write()
