"""A trainer of ours as a backend."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from latentmake.training.backend import Backend

if TYPE_CHECKING:
    from latentmake.training.checks import Finding
    from latentmake.training.loop.order import TrainingOrder


class LoopBackend(Backend):
    """A trainer that trains by the loop.

    Attributes:
        order_type: class of its orders.
    """

    order_type: type[TrainingOrder]

    def check(self, order: Any, *, current: bool) -> Iterable[Finding]:
        """Check what the trainer's settings need."""
        from latentmake.training.loop.checks import check_settings

        del current
        return check_settings(order.trainer)

    def train(
        self, order: Path, *, log: Path, receipt: Path, processes: int = 1, threads: int = 2
    ) -> None:
        """Bring the trained weights of an order up to date, and write the receipt."""
        from latentmake.training.loop.launch import train

        train(
            self.order_type, order, log=log, receipt=receipt, processes=processes, threads=threads
        )
