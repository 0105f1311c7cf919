"""Trainers: our own, and those of others that are launched. A launcher imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

__all__ = ["Publisher", "Trainer", "publisher_of", "trainer_of"]


Publisher = Callable[[Path, Callable[[str], None]], None]
"""Publishes the run of an order file; is given something that says a line to the user."""


class Trainer(Protocol):
    """What a launcher's module offers."""

    def train(
        self, order_path: Path, *, log: Path, receipt: Path, processes: int = 1, threads: int = 2
    ) -> None:
        """Bring the trained weights of an order up to date, and write the receipt."""


def trainer_of(order: Path) -> Trainer:
    """Return who carries out a training order: its name ends in the order's kind."""
    if order.name.endswith(".wan.json"):
        from latentmake.training.external.musubi import launch as launch_musubi

        return launch_musubi
    if order.name.endswith(".sdscripts.json"):
        from latentmake.training.external.sdscripts import launch as launch_sdscripts

        return launch_sdscripts
    from latentmake.training.sd import launch

    return launch


def publisher_of(order: Path) -> Publisher:
    """Return who publishes a run: its order's name ends in the order's kind."""
    if order.name.endswith(".sdscripts.json"):
        from latentmake.training.external.sdscripts.publish import (
            publish_order as publish_sdscripts,
        )

        return publish_sdscripts
    from latentmake.training.external.musubi.publish import publish_order as publish_musubi

    return publish_musubi
