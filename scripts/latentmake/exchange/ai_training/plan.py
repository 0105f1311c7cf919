"""Planning of adoption and export: checks, and the order of an export."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from latentmake.config.models import Model
from latentmake.config.root import Run
from latentmake.config.weights import Adopt
from latentmake.data.item import IMAGE_EXTENSIONS
from latentmake.errors import ConfigError
from latentmake.exchange.ai_training.export import ExportOrder
from latentmake.exchange.shapes import (
    Latents,
    Text,
    attended_width,
    latents_shape,
    text_tokens,
    text_width,
)
from latentmake.geometry.buckets import Size
from latentmake.plan.facts import Facts
from latentmake.plan.manifest import run_folder
from latentmake.plan.run_plan import RunPlan

if TYPE_CHECKING:
    from latentmake.exchange.ai_training.adopt import AiTraining


def plan_adopt(facts: Facts, plan: RunPlan, run: Run) -> AiTraining:
    """Return the files to adopt for a run's stale targets.

    Raises:
        ConfigError: it cannot be adopted.
        ModelError: a model's configuration cannot be read.
    """
    from latentmake.exchange.ai_training.adopt import (
        AiTraining,
    )  # planning an export needs no numpy

    model = facts.config.models[run.model]
    adopt = _adopt(facts, run)
    for dataset in run.datasets:
        if adopt.text is not None and facts.config.datasets[dataset].composed:
            raise ConfigError(
                f"the texts of {dataset} are not just what its caption files hold, as adopted "
                "embeddings are",
                where=f"run {plan.name}",
                hint=f"leave out models.{run.model}.ai_training.text, so that they are encoded",
            )
        if facts.config.datasets[dataset].remote:
            raise ConfigError(
                f"the dataset {dataset} lies at a URL, and caches are adopted from folders on disk",
                where=f"run {plan.name}",
                hint="copy it to a folder, or let its caches be encoded",
            )
    return AiTraining(
        roots={dataset: facts.scan(dataset).root for dataset in run.datasets},
        ending=adopt.latents,
        latents=_latents(run.model, model) if adopt.latents is not None else None,
        texts=_texts(run.model, model, adopt.text or []),
        sizes=[Size(size.width, size.height) for size in run.resolutions],
    )


def plan_export(facts: Facts, plan: RunPlan, run: Run) -> ExportOrder:
    """Return the order to export a run's caches.

    Raises:
        ConfigError: they cannot be exported.
        ModelError: a model's configuration cannot be read.
    """
    model, export = facts.config.models[run.model], facts.config.export
    adopt = _adopt(facts, run)
    known = [size.name for size in run.resolutions]
    if export.resolution is None and len(known) > 1:
        raise ConfigError(
            f"the run {plan.name} has the resolutions {', '.join(known)}, and ai-training's names "
            "have room for one",
            where="export.resolution",
            hint="choose one of them",
        )
    part = known[0] if export.resolution is None else export.resolution.name
    if part not in known:
        raise ConfigError(
            f"the run {plan.name} has no resolution {part}",
            where="export.resolution",
            hint=f"choose one of {', '.join(known)}",
        )
    for dataset in run.datasets:
        if facts.config.datasets[dataset].remote and export.folder is None:
            raise ConfigError(
                f"the dataset {dataset} lies at a URL, where nothing is written",
                where="export.folder",
                hint="name a folder on this disk",
            )
    texts = _texts(run.model, model, adopt.text or [])
    return ExportOrder(
        run=plan.name,
        manifest=str(run_folder(plan.name) / "manifest.jsonl"),
        folder=export.folder,
        part=part,
        ending=adopt.latents,
        dtype=model.vae_dtype or model.dtype,
        texts=[(text.ending, text.tokens.padded) for text in texts],
        text_dtype=model.caption_dtype,
        overwrite=export.overwrite,
    )


def _adopt(facts: Facts, run: Run) -> Adopt:
    """Return the `ai_training` section of a run's model, checked."""
    adopt, where = facts.config.models[run.model].ai_training, f"models.{run.model}.ai_training"
    if adopt is None:
        raise ConfigError(
            "this key is missing",
            where=where,
            hint="name what ai-training's files end in: {latents: .img_sdxl, text: .txt_t5cache}",
        )
    for ending in [*([adopt.latents] if adopt.latents else []), *(adopt.text or [])]:
        caption = [
            name
            for name in run.datasets
            if ending.endswith(facts.config.datasets[name].caption_extension)
        ]
        if caption or f".{ending.lower().rpartition('.')[2]}" in IMAGE_EXTENSIONS:
            taken = f"a caption of {caption[0]}" if caption else "an image"
            raise ConfigError(
                f"what ends in {ending} is taken for {taken}", where=where, hint="use another"
            )
    return adopt


def _latents(name: str, model: Model) -> Latents:
    found = latents_shape(model.vae)
    if found is None:
        raise _unknown(f"models.{name}.vae")
    return found


def _texts(name: str, model: Model, endings: Sequence[str]) -> list[Text]:
    found: list[Text] = []
    for place, ending in zip(model.text, endings, strict=False):
        tokens, width = text_tokens(place), text_width(place)
        if width is None and place.projection is not None and model.unet is not None:
            width = attended_width(model.unet)  # the width after any projection
        if tokens is None or width is None:
            raise _unknown(f"models.{name}.text")
        found.append(Text(ending=ending, tokens=tokens, width=width))
    return found


def _unknown(where: str) -> ConfigError:
    return ConfigError(
        "no config.json on this disk says what its caches are like",
        where=where,
        hint="name a folder that has one as `path`, or the file as `config`",
    )
