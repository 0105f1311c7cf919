"""Parts of runs, and the plans of runs."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from pydantic import BaseModel

from latentmake import digest, layouts
from latentmake.config.datasets import Dataset
from latentmake.config.root import Config
from latentmake.config.runs import Run
from latentmake.layouts import kind_of
from latentmake.plan import manifest
from latentmake.plan.jobs import EncodingJob
from latentmake.plan.keys import Source
from latentmake.plan.orders import WorkOrder
from latentmake.plan.staleness import PartState
from latentmake.plan.training_estimate import TrainingEstimate
from latentmake.sources.items import Fault, Item

PROMPTS = "_prompts"
"""Dataset of the prompts of sample pictures and of generated clips, each an item named by its
digest."""


class Part(NamedTuple):
    """The targets of one dataset, model and part.

    A part is a resolution (`64`, `480x832`), a text (`text`, `text.1`), or, where a layout keeps
    the texts of each resolution, `text@480x832`, `text.1@480x832`.
    """

    dataset: str
    model: str
    name: str


@dataclass
class RunPlan:
    """Plan of one run.

    Attributes:
        orders: of the batches that make its stale targets.
        faults: dataset -> faults of its items.
        manifest_order: of the manifest job; None where manifest and lock are fresh.
        training_order: of the trainer; None where the run is trained, or has no trainer.
        trainer_order: of checklist and publication; None where the run has no trainer.
        trainer: the order whose file is `trainer_order`.
        images: dataset -> digest of the paths of its images.
        lock: digest of what trains, from its lock; None where its manifest is to be written.
        rules: dataset -> the change of a rule by which its captions, which the trainer encodes,
            became others, and their number.
        note: a line for the plan, where its training goes on from a checkpoint, or only writes
            files of trained weights anew.
    """

    name: str
    parts: dict[Part, PartState]
    orders: list[WorkOrder] = field(default_factory=list)
    faults: dict[str, list[Fault]] = field(default_factory=dict)
    manifest_order: Path | None = None
    training_order: Path | None = None
    trainer_order: Path | None = None
    trainer: BaseModel | None = None
    images: dict[str, str] = field(default_factory=dict)
    lock: str | None = None
    rules: dict[str, tuple[str, int]] = field(default_factory=dict)
    estimate: TrainingEstimate | None = None
    note: str = ""

    def receipts(self, *kinds: str) -> list[str]:
        """Return the receipts of its batches of some kinds."""
        return [str(order.receipt) for order in self.orders if order.kind in kinds]


@dataclass
class Plan:
    """Plans of the runs asked for; `jobs` encode for them, none twice."""

    runs: dict[str, RunPlan]
    jobs: list[EncodingJob]

    @property
    def orders(self) -> list[WorkOrder]:
        """Work orders of all jobs."""
        return [order for job in self.jobs for order in job.orders]


def run_folder(run: str) -> Path:
    """Return the folder of a run's manifest, lock and results."""
    return Path("runs") / run


def read_lock(run: str) -> manifest.Lock:
    """Return a run's lock; an empty one where there is none."""
    return manifest.read_lock(run_folder(run) / "dataset.lock")


def parts_of(config: Config, run: Run, *, generated: bool = False) -> list[Part]:
    """Return the parts that a run needs; if it is to generate clips, those of their prompts too."""
    parts = [
        Part(dataset, run.model, name)
        for dataset in run.datasets
        for name in part_names(config, run, dataset)
    ]
    texts = prompts_of(run) or (generated and generation_prompts(config, run))
    return [*parts, Part(PROMPTS, run.model, "text")] if texts else parts


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
    """Return the prompts whose embeddings a training needs besides those of its captions."""
    return run.trainer.prompts if run.trainer else []


def generation_prompts(config: Config, run: Run) -> list[str]:
    """Return the prompts whose embeddings the clips generated by a run need, none twice."""
    settings = config.generation(run)
    negative = [settings.negative_prompt] if settings.guidance_scale > 1 else []
    return list(dict.fromkeys([*settings.prompts, *negative]))


def known_prompts(config: Config, model: str) -> set[str]:
    """Return the prompts of all runs of a model, whether this command needs them or not."""
    return {
        text
        for run in config.runs.values()
        if run.model == model
        for text in (*prompts_of(run), *generation_prompts(config, run))
    }


def prompt_path(config: Config, model: str, text: str) -> str:
    """Return the cache file of a prompt's embedding."""
    layout = layouts.of(config.models[model].layout_name)
    folder = layout.folder(PROMPTS, model, "text")
    (named,) = layout.named(folder, "text", _prompt_stem(text), None, None)
    return named.path


def prompt_sources(texts: Iterable[str]) -> list[Source]:
    """Return the sources of the embeddings of some prompts, none twice."""
    return sorted(Source(_prompt_stem(text), None, None, text) for text in {*texts})


def awaits_prompts(plan: RunPlan, prompts: Collection[str]) -> bool:
    """Whether the embedding of one of these prompts of a run is to be made."""
    return any(
        stale.source.text in prompts
        for part, state in plan.parts.items()
        for stale in (state.stale if part.dataset == PROMPTS else ())
    )


def _prompt_stem(text: str) -> str:
    return digest.of_bytes(text.encode())[:20]


def source_of(part: str, item: Item, *, controlled_text: bool = False) -> Source:
    """Return the source of an item's targets of a part; `controlled_text` is the layout's."""
    if kind_of(part) == "latents":
        return Source(
            item.stem,
            item.image,
            item.image_stat,
            controls=item.controls,
            control_stats=item.control_stats,
            media=item.media,
            span=item.span,
            layers=item.layers,
            layer_stats=item.layer_stats,
            control_sizes=item.control_sizes,
        )
    found = _text_source(part, item)
    if item.former is not None and layouts.text_of(part) != layouts.DROPPED:
        found = found._replace(former=_text_source(part, item._replace(texts=item.former or None)))
    if not controlled_text or not item.controls:
        return found
    return found._replace(
        controls=item.controls,
        control_stats=item.control_stats,
        media=item.media,
        control_sizes=item.control_sizes,
        image=item.image,
    )


def _text_source(part: str, item: Item) -> Source:
    if item.texts is not None:
        name = layouts.text_of(part)
        number = name.partition(".")[2]
        text = "" if name == layouts.DROPPED else item.texts[int(number or 0)]
        return Source(item.stem, None, None, text)
    if item.caption is None:
        return Source(item.stem, None, None, "")
    return Source(item.stem, item.caption, item.caption_stat)
