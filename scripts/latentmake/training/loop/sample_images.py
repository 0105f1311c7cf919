"""Index of the sample pictures of a training.

No torch and no Pillow here: planner and launcher ask whether the pictures of a training are there,
and the comparison of runs shows them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

from pydantic import ConfigDict, Field, JsonValue, StringConstraints

from latentmake.plan.state import Difference, short, value_differences
from latentmake.training.loop.order import TrainingOrder
from latentmake.training.order import JsonFile, RunFiles, Wanted

CURVES = "curves.png"
"""The curves of a training, in its run's folder."""

INDEX = "index.json"
"""Index of the sample pictures, in their folder."""

_Name = Annotated[str, StringConstraints(pattern=r"^step-\d{6,}_\d{2,}\.(png|mp4)$")]


class PictureIndex(JsonFile):
    """Index of the sample pictures of one training; written anew after those of each step.

    Attributes:
        run: name of the run.
        wanted: digests of the training.
        seed: of the noise.
        steps: after which they were drawn, ascending.
        files: names of the pictures, a row a step and one a prompt; None where a picture cannot be
            drawn, as the weights of its step were gone before it was asked for.
        keys: of the pictures of each prompt, see `TrainingOrder.picture_keys`; earlier releases
            write none.
        pictures: see `TrainingOrder.pictures_digest`; "" before those of the last step.
        curves: whether there were any to draw.
        settings: that shaped the training, by name.
    """

    model_config = ConfigDict(extra="ignore", frozen=True)
    run: str
    wanted: Wanted
    prompts: list[str]
    seed: int
    steps: list[int]
    files: list[list[_Name | None]]
    keys: list[str] = Field([])
    pictures: str = ""
    curves: bool
    settings: dict[str, JsonValue]

    @classmethod
    def of(
        cls,
        order: TrainingOrder,
        want: Wanted,
        rows: Mapping[int, Sequence[str | None]],
        *,
        curves: bool,
    ) -> PictureIndex:
        """Return the index of a training's pictures, whose names `rows` has for each step."""
        return cls(
            run=order.run,
            wanted=want,
            prompts=[prompt.prompt for prompt in order.prompts] if rows else [],
            seed=order.trainer.samples.seed,
            steps=sorted(rows),
            files=[list(rows[step]) for step in sorted(rows)],
            keys=order.picture_keys(),
            pictures=order.pictures_digest(),
            curves=curves,
            settings={
                **order.described(),
                "weights": want.weights,
                "data": want.data,
                "trainer": order.trainer.model_dump(mode="json"),
                "sample_size": [*order.sample_size],
            },
        )


def picture_name(step: int, prompt: int, suffix: str = ".png") -> str:
    """Return the name of the picture of a prompt, by its number from 0, after some step."""
    return f"step-{step:06d}_{prompt:02d}{suffix}"


def read_index(folder: Path) -> PictureIndex | None:
    """Return the index of a folder of sample pictures; None where there is none that fits."""
    index = PictureIndex.read(folder / INDEX)
    if index is None:
        return None
    complete = [len(row) for row in index.files] == [len(index.prompts)] * len(index.steps)
    return index if complete else None


def picture_reasons(order: TrainingOrder, want: Wanted) -> list[Difference]:
    """Return why pictures and curves are not those of the training `want`."""
    run_files = RunFiles(order)
    index = read_index(run_files.samples)
    if index is None:
        return [Difference("sample pictures are not drawn yet")]
    if index.wanted != want:
        return [Difference("sample pictures are of an earlier training")]
    if index.pictures != (today := order.pictures_digest()):
        now = order.trainer.samples.model_dump(mode="json")
        trainer = index.settings.get("trainer")
        was = trainer.get("samples") if isinstance(trainer, dict) else None
        known = value_differences(was, now, "samples.{}") if isinstance(was, dict) else []
        digests = Difference("settings of sample pictures", short(index.pictures), short(today))
        return known or [digests]
    names = [name for row in index.files for name in row if name is not None]
    files = [run_files.samples / name for name in names] + [run_files.grid] * bool(names)
    files += [run_files.output / CURVES] * index.curves
    found = [Difference(f"{path} is missing") for path in files if not path.is_file()]
    if not found and bool(names) != bool(order.prompts or order.captions):
        found = [Difference("other sample pictures are asked for")]
    return found
