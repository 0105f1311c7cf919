"""Order of `captions_{run}`: the texts of a run.

The planner writes it; the job loads tokenizers and writes the page.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import NamedTuple

from pydantic import BaseModel

from latentmake.config import Model, Run
from latentmake.files import atomic
from latentmake.plan.facts import Facts
from latentmake.plan.orders import run_order
from latentmake.plan.parts import RunPlan

__all__ = ["Captioned", "CaptionsOrder", "plan_captions"]


class Captioned(NamedTuple):
    """One item.

    Attributes:
        image: path of its image or video.
        caption: path of its caption file; None for the empty caption.
        texts: variants of its text; None where it is that of the caption file.
    """

    dataset: str
    stem: str
    image: str
    caption: str | None
    texts: list[str] | None


class CaptionsOrder(BaseModel, extra="forbid", frozen=True):
    """Order to list the texts of a run.

    Attributes:
        model: for its tokenizers.
        faults: of items, a line each.
        planned: time in nanoseconds; makes each order another file.
    """

    run: str
    model: Model
    faults: list[str]
    planned: int
    items: list[Captioned]


def plan_captions(facts: Facts, plan: RunPlan, run: Run) -> Path:
    """Write the order to list a run's texts; return its path.

    Raises:
        UserError: a dataset cannot be read.
        StorageError: the disk is full or cannot be written.
    """
    found = {name: facts.items(name, run.model) for name in run.datasets}
    order = CaptionsOrder(
        run=plan.name,
        model=facts.config.models[run.model],
        faults=[fault.line for _, faults in found.values() for fault in faults],
        planned=time.time_ns(),
        items=[
            Captioned(name, item.stem, item.image, item.caption, item.texts)
            for name, (items, _) in found.items()
            for item in items
        ],
    )
    path = run_order(plan.name, "captions", order.planned)
    atomic.write(path, order.model_dump_json().encode())
    return path
