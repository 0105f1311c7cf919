"""What a run consists of: its parts, and what was found out about them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from latentmake import digest, layouts
from latentmake.config import Config, Dataset, Run
from latentmake.layouts import kind_of, plain, size_of
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
    "kind_of",
    "part_names",
    "parts_of",
    "prompt_path",
    "prompt_sources",
    "prompts_of",
    "read_lock",
    "resolutions_of",
    "run_folder",
    "size_of",
    "source_of",
    "text_parts",
]

PROMPTS = "_prompts"
"""Stands for a dataset: the prompts of sample pictures, each an item named by its digest."""


class Part(NamedTuple):
    """The targets of one dataset, model and part.

    A part is a resolution's name (`64`, `480x832`), `text`, further variants of the items' texts
    (`text.1`), or, where a layout keeps the text with each resolution, `text@480x832`.
    """

    dataset: str
    model: str
    name: str


@dataclass
class RunPlan:
    """What one run needs.

    Attributes:
        name: of the run.
        parts: its targets, each part's state.
        orders: batch jobs that make what is stale, by kind (`latents`, `text`).
        faults: dataset -> what is wrong with its items.
        manifest_order: for the manifest job; None where manifest and lock are fresh.
        training_order: for the trainer; None where the run is trained, or has no trainer.
        trainer_order: for checklist and publication; None where the run has no trainer.
        images: dataset -> digest of the paths of its images.
        lock: digest of its lock; None where its manifest is to be written.
    """

    name: str
    parts: dict[Part, PartState]
    orders: dict[str, list[WorkOrder]] = field(default_factory=lambda: {"latents": [], "text": []})
    faults: dict[str, list[Fault]] = field(default_factory=dict)
    manifest_order: Path | None = None
    training_order: Path | None = None
    trainer_order: Path | None = None
    images: dict[str, str] = field(default_factory=dict)
    lock: str | None = None

    def receipts(self, *kinds: str) -> list[str]:
        """Return the receipts of its batch jobs of some kinds."""
        return [str(order.receipt) for kind in kinds for order in self.orders[kind]]


@dataclass
class Plan:
    """The plans of all runs asked for.

    Attributes:
        runs: name -> its plan.
        orders: their batch jobs, none twice.
        minutes: name of an order -> how long its job will take, where past jobs tell.
    """

    runs: dict[str, RunPlan]
    orders: list[WorkOrder]
    minutes: dict[str, float] = field(default_factory=dict)


def run_folder(run: str) -> Path:
    """Return the folder of a run's manifest, lock and results."""
    return Path("runs") / run


def read_lock(run: str) -> manifest.Lock:
    """Return a run's lock; an empty one where there is none."""
    return manifest.read_lock(run_folder(run) / "dataset.lock")


def resolutions_of(run: Run) -> list[str]:
    """Return the names of a run's resolutions."""
    return [size.name for size in run.resolutions]


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
    return layout.parts(resolutions_of(run), text_parts(config.datasets[dataset]))


def text_parts(settings: Dataset) -> list[str]:
    """Return a part for each variant of the items' texts: `text`, `text.1`, ..., `text.dropped`."""
    names = ["text", *(f"text.{number}" for number in range(1, settings.text_variants))]
    making = settings.captions
    return [*names, layouts.DROPPED] if making and making.caption_dropout_every_n_epochs else names


def prompts_of(run: Run) -> list[str]:
    """Return the prompts whose embeddings a run needs besides those of its captions."""
    return run.trainer.prompts if run.trainer else []


def prompt_stem(text: str) -> str:
    """Return the name of a prompt's item: a digest of its text."""
    return digest.of_bytes(text.encode())[:20]


def prompt_path(model: str, text: str) -> str:
    """Return the cache file of a prompt's embedding."""
    return plain.path(PROMPTS, model, "text", prompt_stem(text))


def prompt_sources(runs: Iterable[Run]) -> list[Source]:
    """Return what the embeddings of some runs' prompts are made from, none twice."""
    texts = {text for run in runs for text in prompts_of(run)}
    return sorted(Source(prompt_stem(text), None, None, text) for text in texts)


def source_of(part: str, item: Item) -> Source:
    """Return what an item's target of a part is made from."""
    if kind_of(part) == "latents":
        return Source(
            item.stem,
            item.image,
            item.image_stat,
            control=item.control,
            control_stat=item.control_stat,
            media=item.media,
        )
    if item.texts is not None:
        variant = part.partition(".")[2]
        text = "" if part == layouts.DROPPED else item.texts[int(variant or 0)]
        return Source(item.stem, None, None, text)
    if item.caption is None:
        return Source(item.stem, None, None, "")
    return Source(item.stem, item.caption, item.caption_stat)
