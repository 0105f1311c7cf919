"""Runs: datasets, model, resolutions and trainer."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import BeforeValidator, Field

from latentmake.config.fields import Closed, Number, ResolutionField, listed
from latentmake.config.generation import Generation
from latentmake.config.shapes import CLIPS, MANIFEST, Shapes
from latentmake.config.trainers import MusubiTrainer, SdScriptsTrainer, SdTrainer, WanTrainer


class Validation(Closed):
    """Items that do not train, by which trained weights are judged."""

    shapes: ClassVar[Shapes] = Shapes("manifest", "weights")

    items: Number = Field(ge=1)
    """Sources held out of training, each with all its clips; at most half of them."""
    clips: Number = Field(8, ge=0, json_schema_extra=CLIPS)
    """Held-out items of which evaluate_{run} makes clips, videos first."""


class Run(Closed):
    """Datasets x resolutions x model x trainer settings; its target is `train_{run}`."""

    datasets: Annotated[
        list[str],
        BeforeValidator(listed, json_schema_input_type=str | list[str]),
        Field(min_length=1, json_schema_extra=MANIFEST),
    ]
    """Datasets to train on."""
    model: str = Field(json_schema_extra=Shapes("latents", "text", "weights"))
    """Model: its encoders, and the network to train."""
    resolutions: Annotated[
        list[ResolutionField],
        BeforeValidator(listed, json_schema_input_type=ResolutionField | list[ResolutionField]),
        Field(min_length=1, json_schema_extra=Shapes("latents", "manifest")),
    ]
    """A side in pixels, or [width, height], each."""
    trainer: (
        Annotated[
            SdTrainer | MusubiTrainer | SdScriptsTrainer | WanTrainer, Field(discriminator="kind")
        ]
        | None
    ) = None
    """Trainer and its settings; without it the run is its caches alone."""
    generate: Generation | None = None
    """Clips that generate_{run} makes."""
    validation: Validation | None = None
    """Sources held out of training, for evaluate_{run}."""
