"""Runs: datasets, model, resolutions and trainer."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field

from latentmake.config.external_trainers import MusubiTrainer, SdScriptsTrainer
from latentmake.config.fields import (
    CLIPS,
    MANIFEST,
    Closed,
    Number,
    ResolutionField,
    Shapes,
    listed,
    shaped,
)
from latentmake.config.trainers import Generation, SdTrainer, WanTrainer


class Validation(Closed, shapes=Shapes("manifest", "weights")):
    """Items held out of the training."""

    items: Number = Field(ge=1)
    """Number of sources (images or videos) to hold out, at most half of those of the run."""
    clips: Number = shaped(8, CLIPS, ge=0)
    """Number of held-out items for which `evaluate_{run}` draws clips: videos first, then images,
    in the order of datasets and names. With `0` it only computes losses."""


class Run(Closed):
    """Datasets, a model, resolutions and a trainer."""

    datasets: Annotated[
        list[str],
        BeforeValidator(listed, json_schema_input_type=str | list[str]),
        Field(min_length=1, json_schema_extra=MANIFEST),
    ]
    """Names of `datasets` to train on."""
    model: str = Field(json_schema_extra=Shapes("latents", "text", "weights"))
    """Name of the model in `models`. After a change, only latents and embeddings that the other
    model lacks are made."""
    resolutions: Annotated[
        list[ResolutionField],
        BeforeValidator(listed, json_schema_input_type=ResolutionField | list[ResolutionField]),
        Field(min_length=1, json_schema_extra=Shapes("latents", "manifest")),
    ]
    """Sizes at which every item is encoded: `512` for a square, `[512, 768]` or `512x768` for
    width and height, at most 8192 a side. With `fit: bucket` a size stands for its area. Sides are
    multiples of the VAE's factor (8 for Stable Diffusion, 16 for Wan; see
    [architectures](architectures.md)). Latents lie in `cache/{dataset}/{model}/512/` or
    `.../512x768/`."""
    trainer: (
        Annotated[
            SdTrainer | MusubiTrainer | SdScriptsTrainer | WanTrainer, Field(discriminator="kind")
        ]
        | None
    ) = None
    """Trainer and its settings. `kind` is [`sd`](trainer-sd.md), [`wan`](trainer-wan.md),
    [`musubi`](trainer-musubi.md) or [`sdscripts`](trainer-sdscripts.md). Without a trainer, the
    run consists of its caches, `manifest.jsonl` and `dataset.lock`, for a trainer of your own."""
    generate: Generation | None = None
    """[Clips](generate.md) that `generate_{run}` draws, with the trainer `wan`."""
    validation: Validation | None = None
    """[Items held out](validation.md) of the training, with the trainer `wan`."""
