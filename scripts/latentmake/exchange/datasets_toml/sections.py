"""Blocks of dataset files in the words of our configuration: a `Block` for each folder.

Blocks of one folder with the same settings are one dataset at several resolutions. A run has all
its datasets at all its resolutions, so that datasets of other resolutions are another run.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from latentmake.config import resolution_name
from latentmake.exchange.datasets_toml.document import Note

__all__ = ["Block", "Dataset", "Run", "datasets_of", "runs_of"]


@dataclass
class Block:
    """A folder or list at one resolution.

    Attributes:
        where: place in the file.
        values: keys of our dataset section.
        resolution: width and height, in pixels.
        batch_size: items a step.
        caches: folders that may hold caches of it.
    """

    where: str
    values: dict[str, Any]
    resolution: tuple[int, int]
    batch_size: int = 1
    caches: list[str] = field(default_factory=list)


class Dataset(NamedTuple):
    """A dataset of ours, and the blocks that it stands for."""

    name: str
    values: dict[str, Any]
    blocks: list[Block]

    @property
    def resolutions(self) -> tuple[tuple[int, int], ...]:
        """Its resolutions, in their order in the file, none twice."""
        return tuple(dict.fromkeys(block.resolution for block in self.blocks))


class Run(NamedTuple):
    """A run of ours."""

    name: str
    datasets: list[Dataset]

    @property
    def resolutions(self) -> tuple[tuple[int, int], ...]:
        """Its resolutions, in the order of the file."""
        return self.datasets[0].resolutions

    @property
    def batch_sizes(self) -> list[int]:
        """Batch sizes of its blocks, ascending, none twice."""
        return sorted({block.batch_size for each in self.datasets for block in each.blocks})


def datasets_of(blocks: Sequence[Block]) -> list[Dataset]:
    """Return the datasets that some blocks stand for, each with a name of its own."""
    alike: dict[str, list[Block]] = {}
    for block in blocks:
        alike.setdefault(json.dumps(block.values, sort_keys=True), []).append(block)
    found: list[Dataset] = []
    names: set[str] = set()
    for several in alike.values():
        name = base = _name(str(several[0].values["path"]))
        number = 2
        while name in names:
            name, number = f"{base}_{number}", number + 1
        names.add(name)
        caches = [folder for block in several for folder in block.caches]
        values = dict(several[0].values)
        if caches:
            values["adopt_from"] = list(dict.fromkeys(caches))
        found.append(Dataset(name, values, several))
    return found


def runs_of(name: str, datasets: Sequence[Dataset]) -> tuple[list[Run], list[Note]]:
    """Return the runs of some datasets, and notes about what they train differently."""
    alike: dict[frozenset[tuple[int, int]], list[Dataset]] = {}
    for dataset in datasets:
        alike.setdefault(frozenset(dataset.resolutions), []).append(dataset)
    runs = [
        Run(name if number == 1 else f"{name}_{number}", several)
        for number, several in enumerate(alike.values(), 1)
    ]
    notes: list[Note] = []
    if len(runs) > 1:
        parts = " and ".join(
            f"{run.name} ({', '.join(resolution_name(*size) for size in run.resolutions)})"
            for run in runs
        )
        notes.append(
            Note(
                "resolution",
                f"its datasets have different ones, and a run has all of its datasets at all of "
                f"its resolutions: these are the runs {parts}, which train one after the other "
                "and not together",
                "to train all in one, give one run all datasets and the resolutions that all "
                "shall have",
            )
        )
    for run in runs:
        if len(sizes := run.batch_sizes) > 1:
            notes.append(
                Note(
                    "batch_size",
                    f"is {' or '.join(map(str, sizes))}, and the run {run.name} has one: the "
                    "smallest",
                    "raise it if memory allows",
                )
            )
    return runs, notes


def _name(path: str) -> str:
    """Return a dataset's name, from the name of its folder or list."""
    place = Path(path.replace("\\", "/"))
    last = place.stem if place.suffix.lower() in (".jsonl", ".json") else place.name
    name = re.sub(r"[^A-Za-z0-9_.-]+", "_", last).lstrip("_.-")
    return name or "dataset"
