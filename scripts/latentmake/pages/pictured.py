"""Results of runs that a page compares: their pictures, LoRAs, losses and settings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import isfinite
from pathlib import Path
from typing import NamedTuple

from pydantic import JsonValue

from latentmake.runs.order import COPIED, Record, parts_in
from latentmake.runs.results import FOLDER, INDEX, GenerationIndex, PictureIndex

_ALL_STEPS = "*"
_LOSSES = ("loss", "validation_loss")
_POINTS = 200  # largest number of points of a curve


Row = tuple[str, int | None]
"""Row of a page: a prompt, and the seed if it is a generated clip."""


class Pictured(NamedTuple):
    """Result of a run in its folder, with pictures, clips or both."""

    name: str
    folder: Path
    samples: PictureIndex | None
    clips: GenerationIndex | None

    def files(self) -> Iterator[tuple[Row, str, Path]]:
        """Yield row, step and path of each picture; generated clips have the step `*`."""
        folder = self.folder
        if self.samples is not None:
            for step, names in zip(self.samples.steps, self.samples.files, strict=True):
                for prompt, name in zip(self.samples.prompts, names, strict=True):
                    if name is not None:
                        yield (prompt, None), str(step), folder / "samples" / name
        for clip in self.clips.clips if self.clips else ():
            if clip.adapter:
                yield (clip.prompt, clip.seed), _ALL_STEPS, folder / FOLDER / clip.file

    def weights(self) -> dict[str, str]:
        """Return step -> path of its LoRA, for the steps whose file still exists."""
        record = Record.read(self.folder / "training.json")
        if record is None:
            return {}
        paths = dict[str, str]()
        for copy in sorted((self.folder / "saved").glob("step-*")):
            if parts_in(copy / COPIED) == record.parts:
                step = str(int(copy.name.removeprefix("step-")))
                paths[step] = str(min(copy.glob("*.safetensors"), default=copy))
        names = [self.folder / name for name in record.files]
        last = min((path for path in names if path.is_file()), default=self.folder)
        return paths | dict.fromkeys((str(record.steps), _ALL_STEPS), str(last))

    def losses(self) -> Iterator[tuple[str, list[tuple[float, float]]]]:
        """Yield the name of each loss curve and its points: step and smoothed loss."""
        logs = self.folder / "logs"
        if not logs.is_dir():
            return
        from latentmake.pages.curves import read_curves, smoothed

        curves = read_curves(logs)
        for name in _LOSSES:
            if name in curves:
                steps, values = curves[name]
                every = -(-len(steps) // _POINTS)
                points = zip(steps[::every], smoothed(values)[::every], strict=True)
                finite = [(step, loss) for step, loss in points if isfinite(loss)]
                yield name, [(float(step), round(float(loss), 6)) for step, loss in finite]

    def values(self) -> dict[str, object]:
        """Return the values that `--json` prints."""
        pictures = [
            {"prompt": prompt, "seed": seed, "step": step, "path": str(path)}
            for (prompt, seed), step, path in self.files()
        ]
        return {"name": self.name, "settings": self.settings(), "pictures": pictures}

    def settings(self) -> dict[str, JsonValue]:
        """Return its settings under flat names, such as `generate.steps`."""
        own: dict[str, JsonValue] = {**self.samples.settings} if self.samples else {}
        if self.clips is not None:
            own["generate"] = {**self.clips.settings}
        return dict(_flat(own))


def index_of(folder: Path) -> PictureIndex | None:
    """Return the index of a result's pictures; None if no pictures belong to its weights."""
    index = PictureIndex.read(folder / "samples" / INDEX)
    record = Record.read(folder / "training.json")
    if index is None or not index.prompts or not index.steps:
        return None
    return index if record is None or record.parts == index.parts else None


def pictures_in(folder: Path, name: str) -> Pictured | None:
    """Return the result in a folder; None if it has no pictures. The page shows it as `name`."""
    samples, clips = index_of(folder), GenerationIndex.read(folder / FOLDER / INDEX)
    clips = clips if clips is not None and clips.clips else None
    return Pictured(name, folder, samples, clips) if samples or clips else None


def _flat(settings: Mapping[str, JsonValue], prefix: str = "") -> Iterator[tuple[str, JsonValue]]:
    for key, value in settings.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value
