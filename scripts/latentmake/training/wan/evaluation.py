"""Evaluation of a Wan run: losses and clips of items that did not train; no torch here.

The result, `runs/{run}/evaluation/metrics.json`, has a key for each part, a digest of all that
shapes it: a part whose key is unchanged is not computed again.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, StringConstraints

from latentmake import digest
from latentmake.plan.facts import Facts
from latentmake.plan.manifest import read_lock, run_folder
from latentmake.plan.run_plan import RunPlan
from latentmake.plan.state import Difference, value_differences
from latentmake.training.order import JsonFile, read_order
from latentmake.training.process import RUN, run_child
from latentmake.training.wan.dit import WanOrder
from latentmake.training.wan.generation import (
    GenerationOrder,
    adapter_digest,
    captions_of,
    clip_reasons,
    generation_order,
)

Kind = Literal["real", "base", "adapter"]
KINDS: tuple[Kind, ...] = ("real", "base", "adapter")
METRICS = "metrics.json"
TIMESTEPS = 10
"""Timesteps of the losses, spread evenly over the distribution of the training's."""
VERSION = 1
"""Raised when the same order would give other results."""

CLIP_NAME = r"^[a-z0-9-]+_(real|base|adapter)\.mp4$"
"""Names of the clips."""

Figures = dict[str, float | None]


def evaluation_folder(run: str) -> Path:
    """Return the folder of a run's `metrics.json` and clips."""
    return run_folder(run) / "evaluation"


class EvaluationOrder(GenerationOrder):
    """Order of an evaluation: of clips whose prompts and sizes are those of held-out items.

    Attributes:
        training: path of the training's order.
        output: folder of results and clips.
        clips: most items of which clips are made.
        resolution: name of that of the clips.
    """

    training: str
    clips: int
    resolution: str

    def wanted(self, lock: str, adapter: str, training: str) -> str:
        """Return the digest of all that shapes the results.

        It is one of three digests: of all items of the run (`lock`), of the trained weights
        (`adapter`), and of the training's network and settings.
        """
        settings = self.settings.values() | {"frames": 0, "width": 0, "height": 0}
        made = [self.weights, settings, self.seeds[0]]
        return digest.of_value(
            [VERSION, TIMESTEPS, lock, adapter, training, self.clips, self.resolution, made]
        )


class Losses(BaseModel):
    """Losses of one item by one network: one a timestep, and the digest of all that shapes them."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    key: str
    values: list[float]


class Clip(BaseModel):
    """One MP4: the digests of all that shapes it (`key`) and of its content (`digest`).

    Its figures are of the frames before compression, see `evaluate.figures_of`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    key: str
    file: Annotated[str, StringConstraints(pattern=CLIP_NAME)]
    digest: str
    width: int
    height: int
    frames: int
    figures: Figures


class Result(BaseModel):
    """Result of one item at one resolution.

    Attributes:
        name: dataset, stem and resolution.
        source: path of its image or video.
        losses: `base` and `adapter`.
        clips: `real`, `base`, `adapter`; empty for items of which none are made.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    name: str
    source: str
    caption: str
    losses: dict[str, Losses]
    clips: dict[Kind, Clip] = {}


class Metrics(JsonFile):
    """Content of `metrics.json`.

    Attributes:
        wanted: see `EvaluationOrder.wanted`.
        timesteps: of the losses, 0 to 1000.
        loss: mean over the items: `base` and `adapter`, at all timesteps together.
        loss_by_timestep: the same, one a timestep.
        figures: `real`, `base`, `adapter` -> figure -> mean over the clips.
        fps: frames a second of the clips.
        settings: name -> value, for people.
        results: one an item and resolution.
    """

    run: str
    wanted: str
    timesteps: list[float]
    loss: dict[str, float]
    loss_by_timestep: dict[str, list[float]]
    figures: dict[Kind, Figures]
    fps: float
    settings: dict[str, str]
    results: list[Result]

    def clips(self) -> Iterator[Clip]:
        """Yield all clips."""
        for result in self.results:
            yield from result.clips.values()


def result_reasons(
    order: EvaluationOrder,
    wanted: str,
    settings: Mapping[str, str],
    file_digest: Callable[[Path], str] = digest.of_file,
) -> list[Difference]:
    """Return why the results of `wanted` are not there, with all their clips as they were written.

    `settings` are those of `Metrics`, as far as they are known.
    """
    metrics = Metrics.read(Path(order.output) / METRICS)
    if metrics is None:
        return [Difference("it has not been evaluated yet")]
    if metrics.wanted != wanted:
        known = value_differences({key: metrics.settings.get(key) for key in settings}, settings)
        return known or [Difference("the items held out, or settings of the evaluation, changed")]
    for clip in metrics.clips():
        path = Path(order.output) / clip.file
        try:
            if file_digest(path) != clip.digest:
                return [Difference(f"{path} is not as it was written")]
        except OSError:
            return [Difference(f"{path} is missing")]
    return []


# -- plan ----------------------------------------------------------------------------------------


def plan_evaluation(facts: Facts, plan: RunPlan) -> tuple[Path, list[Difference]]:
    """Write the order of a run's evaluation; see `Backend.plan_following`."""
    run = facts.config.runs[plan.name]
    training = plan.trainer
    assert run.validation is not None and isinstance(training, WanOrder)
    generation = generation_order(facts, plan.name, run)
    changes = {
        "prompts": [],
        "captions": 0,
        "output": str(evaluation_folder(plan.name)),
        "training": str(plan.trainer_order),
        "clips": run.validation.clips,
        "resolution": run.resolutions[0].name,
    }
    order = EvaluationOrder.model_validate(dict(generation) | changes)
    path = order.write(facts, "evaluate")
    if waits := plan.awaited([order.settings.negative_prompt]):
        return path, waits
    adapter = adapter_digest(order, facts.memo.digest_of_file)
    wanted = order.wanted(read_lock(plan.name).digest, adapter, training_digest(training))
    settings = settings_of(order, training, adapter)
    return path, result_reasons(order, wanted, settings, facts.memo.digest_of_file)


def settings_of(order: EvaluationOrder, training: WanOrder, adapter: str) -> dict[str, str]:
    """Return the settings of an evaluation by name, for people."""
    clips = order.settings
    return {
        "network": ", ".join(filter(None, [training.dit, training.dit_high_noise])),
        "adapter": adapter[:12],
        "steps of a clip": str(clips.num_inference_steps),
        "guidance_scale": str(clips.guidance_scale),
        "flow_shift of clips": str(clips.flow_shift),
        "flow_shift of losses": str(training.flow_shift),
        "scheduler": clips.scheduler,
        "seed": str(order.seeds[0]),
        "negative prompt": clips.negative_prompt,
    }


def training_digest(training: WanOrder) -> str:
    """Return the digest of a training's network, and of all settings that shape a loss."""
    settings = training.trainer
    how = [training.flow_shift, training.boundary, settings.timestep_sampling]
    return digest.of_value([training.weights, how, settings.mixed_precision])


def launch(path: Path, word: str, *, log: Path, threads: int) -> Path:
    """Carry out an order to `generate` or `evaluate` in a process of its own; return its folder."""
    order = read_order(path, EvaluationOrder if word == "evaluate" else GenerationOrder)
    folder = Path(order.output)
    if word == "generate" and not clip_reasons(captions_of(order), adapter_digest(order)):
        return folder
    run_child(
        [sys.executable, *RUN, str(path), word],
        run=order.run,
        folder=folder,
        threads=threads,
        log=log,
        online=bool(order.model.vae.hub),
    )
    return folder
