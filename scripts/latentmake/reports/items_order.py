"""Order of a report's items: sources, captions and cache files of a run.

The planner writes it; the job reads the files, see `report_items`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

from pydantic import BaseModel

from latentmake import digest
from latentmake.config import Dataset, Model, Run
from latentmake.files.media import Media
from latentmake.geometry.clips import Span
from latentmake.plan.facts import Facts
from latentmake.plan.keys import UNKNOWN
from latentmake.plan.parts import RunPlan

__all__ = ["ItemsOrder", "Shown", "Skipped", "decodes", "plan_items", "spread"]

_MOST = 10_000  # items: a page of more is over 10 MB
_Any = TypeVar("_Any")


class Shown(NamedTuple):
    """One item.

    Attributes:
        image: path of its image or video.
        caption: path of its caption file; None for the empty caption.
        texts: variants of its text; None where it is that of the caption file.
        targets: resolution and path of its latents; of a video those of its first clip.
        media: size and length, where the layout's names contain them.
        frame: index of the frame that stands for a video.
    """

    dataset: str
    stem: str
    image: str
    caption: str | None
    texts: list[str] | None
    targets: list[tuple[str, str]]
    media: Media | None = None
    frame: int = 0


class Skipped(NamedTuple):
    """One item that the run leaves out."""

    dataset: str
    stem: str
    path: str
    why: str


class ItemsOrder(BaseModel, extra="forbid", frozen=True):
    """Order to show the items of a run.

    Attributes:
        model: for its VAE and its tokenizers.
        datasets: name -> section of the configuration.
        recipes: dataset -> digest of the recipe of its latents; "" where they are not decoded,
            or the model is not here.
        items: at most 10,000, spread evenly over all.
        total: number of all.
    """

    run: str
    model_name: str
    model: Model
    datasets: dict[str, Dataset]
    recipes: dict[str, str]
    items: list[Shown]
    total: int
    skipped: list[Skipped]


def plan_items(facts: Facts, plan: RunPlan, run: Run) -> ItemsOrder:
    """Return the order to show a run's items.

    Raises:
        UserError: a dataset cannot be read.
    """
    layout = facts.layout(run.model)
    shown: list[Shown] = []
    skipped: list[Skipped] = []
    for name in run.datasets:
        settings = facts.config.datasets[name]
        items, faults = facts.items(name, run.model)
        noted = {each["stem"]: each for each in facts.skipped(name)}
        skipped += [Skipped(name, x.stem, x.path, f"{x.what}; {x.hint}") for x in faults]
        skipped += [Skipped(name, stem, x["path"], x["line"]) for stem, x in noted.items()]
        for item in items:
            if item.stem in noted:
                continue
            targets = []
            for size in run.resolutions:
                folder = layout.folder(name, run.model, size.name)
                named = layout.named(folder, size.name, item.stem, item.media, settings, item.span)
                targets += [(size.name, each.path) for each in named[:1]]
            shown.append(
                Shown(
                    name,
                    item.stem,
                    item.image,
                    item.caption,
                    item.texts,
                    targets,
                    item.media,
                    (item.span or Span()).first,
                )
            )
    return ItemsOrder(
        run=plan.name,
        model_name=run.model,
        model=facts.config.models[run.model],
        datasets={name: facts.config.datasets[name] for name in run.datasets},
        recipes={name: _recipe(facts, name, run.model) for name in run.datasets},
        items=spread(shown, _MOST),
        total=len(shown),
        skipped=skipped,
    )


def decodes(model: Model) -> bool:
    """Whether the latents of a model are those of an AutoencoderKL."""
    return model.spec.encodes and not model.spec.video


def _recipe(facts: Facts, dataset: str, model: str) -> str:
    if not decodes(facts.config.models[model]):
        return UNKNOWN
    recipe = facts.recipe(dataset, model, "latents")
    return digest.of_value(recipe) if recipe else UNKNOWN


def spread(found: Sequence[_Any], most: int) -> list[_Any]:
    """Return at most so many of a sequence, spread evenly from its first to its last."""
    if len(found) <= most:
        return [*found]
    return [found[index * (len(found) - 1) // max(1, most - 1)] for index in range(most)]
