"""Parts of runs, and the plans of runs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from latentmake import digest, layouts
from latentmake.config import Config, Dataset, Run
from latentmake.layouts import kind_of, plain
from latentmake.plan import manifest
from latentmake.plan.keys import Source
from latentmake.plan.orders import WorkOrder
from latentmake.plan.staleness import PartState
from latentmake.sources.items import Fault, Item

__all__ = [
    "PROMPTS",
    "Part",
    "Plan",
    "RunPlan",
    "part_names",
    "parts_of",
    "prompt_path",
    "prompt_sources",
    "prompts_of",
    "read_lock",
    "run_folder",
    "source_of",
    "text_parts",
]

PROMPTS = "_prompts"
"""Dataset of the prompts of sample pictures, each an item named by its digest."""


class Part(NamedTuple):
    """The targets of one dataset, model and part.

    A part is a resolution (`64`, `480x832`), a text (`text`, `text.1`), or, where a layout keeps
    the text with each resolution, `text@480x832`.
    """

    dataset: str
    model: str
    name: str


@dataclass
class RunPlan:
    """Plan of one run.

    Attributes:
        orders: batch jobs that make its stale targets.
        faults: dataset -> faults of its items.
        manifest_order: of the manifest job; None where manifest and lock are fresh.
        training_order: of the trainer; None where the run is trained, or has no trainer.
        trainer_order: of checklist and publication; None where the run has no trainer.
        images: dataset -> digest of the paths of its images.
        lock: digest of its lock; None where its manifest is to be written.
    """

    name: str
    parts: dict[Part, PartState]
    orders: list[WorkOrder] = field(default_factory=list)
    faults: dict[str, list[Fault]] = field(default_factory=dict)
    manifest_order: Path | None = None
    training_order: Path | None = None
    trainer_order: Path | None = None
    images: dict[str, str] = field(default_factory=dict)
    lock: str | None = None

    def receipts(self, *kinds: str) -> list[str]:
        """Return the receipts of its batch jobs of some kinds."""
        return [str(order.receipt) for order in self.orders if order.kind in kinds]


@dataclass
class Plan:
    """Plans of the runs asked for; `orders` are their batch jobs, none twice."""

    runs: dict[str, RunPlan]
    orders: list[WorkOrder]


def run_folder(run: str) -> Path:
    """Return the folder of a run's manifest, lock and results."""
    return Path("runs") / run


def read_lock(run: str) -> manifest.Lock:
    """Return a run's lock; an empty one where there is none."""
    return manifest.read_lock(run_folder(run) / "dataset.lock")


def parts_of(config: Config, run: Run) -> list[Part]:
    """Return the parts that a run needs."""
    parts = [
        Part(dataset, run.model, name)
        for dataset in run.datasets
        for name in part_names(config, run, dataset)
    ]
    return [*parts, Part(PROMPTS, run.model, "text")] if prompts_of(run) else parts


def part_names(config: Config, run: Run, dataset: str) -> list[str]:
    """Return the names of the parts that a run needs of one of its datasets."""
    layout = layouts.of(config.models[run.model].layout_name)
    resolutions = [size.name for size in run.resolutions]
    return layout.parts(resolutions, text_parts(config.datasets[dataset]))


def text_parts(settings: Dataset) -> list[str]:
    """Return a part for each variant of the items' texts: `text`, `text.1`, ..., `text.dropped`."""
    names = ["text", *(f"text.{number}" for number in range(1, settings.text_variants))]
    making = settings.captions
    return [*names, layouts.DROPPED] if making and making.caption_dropout_every_n_epochs else names


def prompts_of(run: Run) -> list[str]:
    """Return the prompts whose embeddings a run needs besides those of its captions."""
    return run.trainer.prompts if run.trainer else []


def prompt_path(model: str, text: str) -> str:
    """Return the cache file of a prompt's embedding."""
    return plain.path(PROMPTS, model, "text", _prompt_stem(text))


def prompt_sources(runs: Iterable[Run]) -> list[Source]:
    """Return the sources of the embeddings of some runs' prompts, none twice."""
    texts = {text for run in runs for text in prompts_of(run)}
    return sorted(Source(_prompt_stem(text), None, None, text) for text in texts)


def _prompt_stem(text: str) -> str:
    return digest.of_bytes(text.encode())[:20]


def source_of(part: str, item: Item) -> Source:
    """Return the source of an item's targets of a part."""
    if kind_of(part) == "latents":
        return Source(
            item.stem,
            item.image,
            item.image_stat,
            control=item.control,
            control_stat=item.control_stat,
            media=item.media,
            span=item.span,
        )
    if item.texts is not None:
        variant = part.partition(".")[2]
        text = "" if part == layouts.DROPPED else item.texts[int(variant or 0)]
        return Source(item.stem, None, None, text)
    if item.caption is None:
        return Source(item.stem, None, None, "")
    return Source(item.stem, item.caption, item.caption_stat)
