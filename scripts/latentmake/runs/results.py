"""Records of what a training left: sample pictures, clips of `generate`, and an evaluation.

Pages show them, and the trainers of this package write them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, JsonValue, StringConstraints, model_validator

from latentmake.base.state_file import JsonFile
from latentmake.plan.manifest import run_folder
from latentmake.plan.product import Made

INDEX = "index.json"
"""File name of the index of sample pictures or clips, in their folder."""
FOLDER = "generated"
"""Folder of the clips of `generate` below that of their run."""
METRICS = "metrics.json"
Kind = Literal["real", "base", "adapter"]
KINDS: tuple[Kind, ...] = ("real", "base", "adapter")
EVALUATED = "settings and held-out items"
"""Part of an evaluation; its digest covers everything that shapes the results."""
CLIP_NAME = r"^[a-z0-9-]+_(real|base|adapter)\.(mp4|png)$"
"""Names of the clips of an evaluation."""

_NAME = r"^[a-z0-9-]+_seed-\d+_(base|adapter)\.(mp4|png)$"
_Picture = Annotated[str, StringConstraints(pattern=r"^step-\d{6,}_\d{2,}\.(png|mp4)$")]


class PictureIndex(Made):
    """Index of the sample pictures of one training. It is written again after each drawn step.

    Attributes:
        run: name of the run.
        prompts: prompts of the pictures.
        seed: seed of the noise.
        steps: steps after which pictures were drawn, ascending.
        files: names of the pictures: a row for each step, with a name for each prompt. None stands
            for a picture that was NaN or infinite, or for which memory did not suffice.
        settings: settings of the training, by name.
    """

    run: str
    prompts: list[str]
    seed: int
    steps: list[int]
    files: list[list[_Picture | None]]
    settings: dict[str, JsonValue]

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if [len(self.prompts)] * len(self.steps) != [*map(len, self.files)]:
            raise ValueError("it has not a picture of each step and prompt")
        return self

    @property
    def shown(self) -> object:
        """Settings that shape the pictures besides the weights."""
        trainer = self.settings.get("trainer")
        samples = trainer.get("samples") if isinstance(trainer, dict) else None
        return samples, self.settings.get("sample_size")


class Clip(JsonFile):
    """A clip in the index.

    Attributes:
        file: name of the MP4 or PNG file.
        key: key of the clip, see `GenerationOrder.key`.
        adapter: digest of the LoRA; "" for a clip without LoRA.
        asked: whether its prompt came from the command line.
        size: bytes of the file; 0 for a clip that has not been drawn yet.
    """

    file: Annotated[str, StringConstraints(pattern=_NAME)]
    key: str
    prompt: str
    seed: int
    adapter: str
    asked: bool
    size: int


class GenerationIndex(Made):
    """Index of the clips of a run. It is written again after each new clip.

    Its parts are those of `GenerationOrder.parts`.
    """

    file: ClassVar[str] = INDEX  # its name
    run: str
    clips: list[Clip]

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of all clips, by name."""
        weights = {"networks", "trained LoRA"}
        return {name: value for name, value in self.parts.items() if name not in weights}


class Losses(JsonFile):
    """Losses of one item with one network.

    Attributes:
        key: digest of everything that shapes them.
        values: losses, one for each timestep.
    """

    key: str
    values: list[float]


class EvaluatedClip(JsonFile, extra="ignore"):  # earlier releases write more
    """A clip of an evaluation.

    Attributes:
        key: digest of everything that shapes it.
        file: name of the file.
        digest: digest of the file.
    """

    key: str
    file: Annotated[str, StringConstraints(pattern=CLIP_NAME)]
    digest: str
    width: int
    height: int
    frames: int


class Result(JsonFile):
    """Result of one item at one resolution.

    Attributes:
        name: dataset, stem and resolution.
        source: path of the item's image or video.
        group: label or folder of the item; earlier releases do not write it.
        losses: losses without (`base`) and with the training (`adapter`).
        clips: clips by kind (`real`, `base`, `adapter`); empty for items without clips.
    """

    name: str
    source: str
    caption: str
    group: str = ""
    losses: dict[str, Losses]
    clips: dict[Kind, EvaluatedClip] = Field({})


class Metrics(Made):
    """Content of `metrics.json`: the record of an evaluation, with its results.

    Attributes:
        timesteps: timesteps of the losses, 0 to 1000.
        loss: `base` and `adapter`: mean over all items and timesteps.
        loss_by_timestep: `base` and `adapter`: mean over all items, for each timestep.
        fps: frames per second of the clips.
        items: number of items and number of items with clips, in words.
        results: one result for each item and resolution.
    """

    run: str
    timesteps: list[float]
    loss: dict[str, float]
    loss_by_timestep: dict[str, list[float]]
    fps: float
    items: str
    results: list[Result]

    @model_validator(mode="after")
    def _fits(self) -> Self:
        losses = [self.loss.keys(), self.loss_by_timestep.keys()]
        losses += [result.losses.keys() for result in self.results]
        if any(kinds != {"base", "adapter"} for kinds in losses):
            raise ValueError("it has not the losses with and without the training")
        if {len(self.timesteps)} != {*map(len, self.loss_by_timestep.values())}:
            raise ValueError("it has not a loss of each timestep")
        return self

    def clips(self) -> Iterator[EvaluatedClip]:
        """Yield all clips."""
        for result in self.results:
            yield from result.clips.values()


def evaluation_folder(run: str) -> Path:
    """Return the folder of a run's `metrics.json` and clips."""
    return run_folder(run) / "evaluation"
