"""Table of adoptions: which caches a run adopts, by the layout of its model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter

from latentmake.config import Run
from latentmake.exchange.ai_training.orders import AdoptOrder
from latentmake.exchange.ai_training.plan import plan_adopt
from latentmake.exchange.trainer_caches.order import CachesOrder, plan_caches
from latentmake.plan.facts import Facts
from latentmake.plan.parts import RunPlan

__all__ = ["adopt_by", "plan_adoption"]

_ORDERS: TypeAdapter[AdoptOrder | CachesOrder] = TypeAdapter(
    Annotated[AdoptOrder | CachesOrder, Field(discriminator="kind")]
)


def plan_adoption(facts: Facts, plan: RunPlan, run: Run) -> AdoptOrder | CachesOrder:
    """Return the order to adopt a run's stale targets; errors are those of its kind."""
    plan_kind = plan_caches if facts.layout(run.model).adopts else plan_adopt
    return plan_kind(facts, plan, run)


def adopt_by(path: Path, *, say: Callable[[str], None], threads: int = 1) -> None:
    """Adopt by the order in a file.

    Raises:
        StorageError: the disk is full or cannot be written.
    """
    # Planning does without what these import.
    from latentmake.exchange.ai_training.adopt import adopt as adopt_ai_training
    from latentmake.exchange.trainer_caches.adopt import adopt as adopt_caches

    order = _ORDERS.validate_json(path.read_bytes())
    if isinstance(order, CachesOrder):
        adopt_caches(order, say=say, threads=threads)
    else:
        adopt_ai_training(order, say=say, threads=threads)
