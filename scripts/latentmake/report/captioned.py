"""What `captions_{run}` is asked to show: every text of a run, as it will be encoded.

No tokenizer here: the planner writes this down, a job counts tokens and makes the page.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from latentmake.config import Model, Run
from latentmake.files import atomic
from latentmake.orders import run_order
from latentmake.parts import RunPlan

if TYPE_CHECKING:
    from latentmake.plan import Planner

__all__ = ["Captioned", "CaptionsOrder", "plan_captions"]


class Captioned(NamedTuple):
    """One item.

    Attributes:
        dataset: its dataset's name.
        stem: names it there.
        image: path of its image or video.
        caption: path of its caption file; None stands for the empty caption.
        texts: the variants of its text; None where it is what the caption file holds.
    """

    dataset: str
    stem: str
    image: str
    caption: str | None
    texts: list[str] | None


@dataclass(frozen=True)
class CaptionsOrder:
    """What the job is asked to show.

    Attributes:
        run: its name.
        model: the model's section of the configuration, whose tokenizers count.
        faults: what is wrong with items, a line each.
        planned: when, in nanoseconds: no two orders are the same file to Snakemake.
        items: of all datasets.
    """

    run: str
    model: dict[str, Any]
    faults: list[str]
    planned: int
    items: list[Captioned]

    def write(self) -> Path:
        """Write it and return its path.

        Raises:
            StorageError: the disk is full or cannot be written.
        """
        head = {**vars(self), "items": None}
        path = run_order(self.run, "captions", self.planned)
        lines = [json.dumps(head), *map(json.dumps, self.items)]
        atomic.write(path, "\n".join(lines).encode())
        return path

    @classmethod
    def read(cls, path: Path) -> CaptionsOrder:
        """Read an order.

        Raises:
            OSError: it cannot be read.
            ValueError: it is not one.
        """
        head, *lines = path.read_text(encoding="utf-8").split("\n")
        return cls(**{**json.loads(head), "items": [Captioned(*json.loads(x)) for x in lines]})


def plan_captions(planner: Planner, plan: RunPlan, run: Run) -> Path:
    """Write the order to show a run's texts.

    Args:
        planner: knows the datasets.
        plan: of the run.
        run: its section of the configuration.

    Returns:
        Path of the order.

    Raises:
        UserError: a dataset cannot be read.
        StorageError: the disk is full or cannot be written.
    """
    model = planner.config.models[run.model]
    return CaptionsOrder(
        run=plan.name,
        model=Model.model_dump(model, mode="json"),
        faults=[fault.line for name in run.datasets for fault in planner.items(name, run.model)[1]],
        planned=time.time_ns(),
        items=list(_items(planner, run)),
    ).write()


def _items(planner: Planner, run: Run) -> Iterator[Captioned]:
    for name in run.datasets:
        for item in planner.items(name, run.model)[0]:
            texts = planner.texts(name, item.stem)
            yield Captioned(name, item.stem, item.image, item.caption, texts)
