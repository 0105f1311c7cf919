"""Order of `captions_{run}`: the texts of a run.

The planner writes it; the job loads tokenizers and writes the page.
"""

from __future__ import annotations

from typing import NamedTuple

from pydantic import BaseModel

from latentmake.config import Model, Run
from latentmake.plan.facts import Facts
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
    """

    run: str
    model: Model
    faults: list[str]
    items: list[Captioned]


def plan_captions(facts: Facts, plan: RunPlan, run: Run) -> CaptionsOrder:
    """Return the order to list a run's texts.

    Raises:
        UserError: a dataset cannot be read.
    """
    found = {name: facts.items(name, run.model) for name in run.datasets}
    return CaptionsOrder(
        run=plan.name,
        model=facts.config.models[run.model],
        faults=[fault.line for _, faults in found.values() for fault in faults],
        items=[
            Captioned(name, item.stem, item.image, item.caption, item.texts)
            for name, (items, _) in found.items()
            for item in items
        ],
    )
