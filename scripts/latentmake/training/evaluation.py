"""Result of an evaluation: losses and clips of items that did not train, base against adapter.

`runs/{run}/evaluation/metrics.json` has it, with a digest of all that shapes each part: what is
still as it was is not computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

from latentmake.plan.parts import run_folder
from latentmake.training.clip_statistics import ClipFigures
from latentmake.training.json_file import JsonFile

__all__ = ["KINDS", "Clip", "Kind", "Losses", "Metrics", "Result", "evaluation_folder"]

Kind = Literal["real", "base", "adapter"]
KINDS: tuple[Kind, ...] = ("real", "base", "adapter")


def evaluation_folder(run: str) -> Path:
    """Return the folder of a run's `metrics.json` and clips."""
    return run_folder(run) / "evaluation"


class Losses(BaseModel):
    """Losses of one item by one network.

    Attributes:
        key: digest of all that shapes them.
        values: one a timestep.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    key: str
    values: list[float]


class Clip(BaseModel):
    """One MP4.

    Attributes:
        key: digest of all that shapes it.
        file: its name in the folder.
        digest: of its content.
        width: pixels.
        height: pixels.
        frames: number of frames.
        figures: of its frames before compression.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    key: str
    file: str
    digest: str
    width: int
    height: int
    frames: int
    figures: ClipFigures


class Result(BaseModel):
    """Result of one item at one resolution.

    Attributes:
        name: dataset, stem and resolution.
        source: path of its image or video.
        caption: its text.
        losses: `base` and `adapter`.
        clips: `real`, `base`, `adapter`; empty for items of which none are generated.
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
        run: name of the run.
        wanted: digest of all that shapes the whole.
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
    figures: dict[Kind, dict[str, float | None]]
    fps: float
    settings: dict[str, str]
    results: list[Result]

    def clips(self) -> Iterator[Clip]:
        """Yield all clips."""
        for result in self.results:
            yield from result.clips.values()

    def complete(self, folder: Path, digest_of: Callable[[Path], str]) -> bool:
        """Whether all its clips lie in a folder as they were written."""
        try:
            return all(digest_of(folder / clip.file) == clip.digest for clip in self.clips())
        except OSError:
            return False
