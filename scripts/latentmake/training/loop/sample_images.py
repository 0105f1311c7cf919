"""Sample pictures of a training as files, and their index.

No torch and no Pillow here: the launcher asks whether the pictures of a training are there, and the
comparison of runs shows them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from pydantic import JsonValue, StringConstraints

from latentmake import digest
from latentmake.files import atomic
from latentmake.plan.reasons import Difference, short, value_differences
from latentmake.training.json_file import JsonFile
from latentmake.training.loop.order import TrainingOrder
from latentmake.training.loop.result import RunFiles
from latentmake.training.order import Wanted

CURVES = "curves.png"
"""The curves of a training, in its run's folder."""

INDEX = "index.json"
"""Index of the sample pictures, in their folder."""

_NAME = r"^step-\d{6,}_\d{2,}\.(png|mp4)$"
_Name = Annotated[str, StringConstraints(pattern=_NAME)]


class PictureIndex(JsonFile):
    """Index of the sample pictures of one training; written after all of them.

    Attributes:
        run: name of the run.
        wanted: digests of the training.
        seed: of the noise.
        steps: after which they were drawn, ascending.
        files: names of the pictures, a row a step and one a prompt; None where the weights of a
            step were gone before its picture was asked for.
        pictures: see `TrainingOrder.pictures_digest`.
        digest: of the bytes of all pictures.
        curves: whether there were any to draw.
        settings: that shaped the training, by name.
    """

    run: str
    wanted: Wanted
    prompts: list[str]
    seed: int
    steps: list[int]
    files: list[list[_Name | None]]
    pictures: str = ""
    digest: str
    curves: bool
    settings: dict[str, JsonValue]


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


def write_pictures(
    folder: Path,
    order: TrainingOrder,
    want: Wanted,
    rows: Mapping[int, list[bytes | None]],
    *,
    curves: bool,
) -> None:
    """Write the pictures of a training and their index; remove those of earlier trainings.

    The index goes first and comes last, so that it never names a picture of another training.

    Args:
        folder: of the pictures.
        order: of the training.
        want: its digests.
        rows: step -> the bytes of a file for each prompt, or None for one that cannot be drawn.
        curves: whether there are any.
    """
    (folder / INDEX).unlink(missing_ok=True)
    names: list[list[str | None]] = []
    files: dict[str, bytes] = {}
    for step, pictures in sorted(rows.items()):
        names.append([None] * len(pictures))
        for number, data in enumerate(pictures):
            if data is not None:
                names[-1][number] = name = picture_name(step, number, order.picture_suffix)
                files[name] = data
    for name, data in files.items():
        atomic.write(folder / name, data)
    if folder.is_dir():
        for path in folder.iterdir():
            if re.fullmatch(_NAME, path.name) and path.name not in files:
                path.unlink()
    index = PictureIndex(
        run=order.run,
        wanted=want,
        prompts=[prompt.prompt for prompt in order.prompts] if files else [],
        seed=order.trainer.samples.seed,
        steps=sorted(rows),
        files=names,
        pictures=order.pictures_digest(),
        digest=digest.of_lines(digest.of_bytes(data) for data in files.values()),
        curves=curves,
        settings={
            **order.described(),
            "weights": want.weights,
            "data": want.data,
            "trainer": order.trainer.model_dump(mode="json"),
            "sample_size": [*order.sample_size],
        },
    )
    index.write(folder / INDEX)
