"""Order of a run of an external trainer, for training, checklist and publication."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from latentmake.config import Config, Dataset, Model, MusubiTrainer, Publish, SdScriptsTrainer
from latentmake.files import atomic
from latentmake.plan.orders import run_order
from latentmake.plan.parts import run_folder

__all__ = ["ExternalOrder", "fields_of"]


class ExternalOrder(BaseModel, ABC):
    """Fields that all external trainers share; paths are relative to the working directory.

    Attributes:
        manifest: JSONL file, one line an item with the paths of its caches.
        lock: file with the digest of what the manifest names.
        output: folder that gets what is trained.
        datasets: name -> its section of the configuration, in the run's order.
        resolutions: (width, height) in pixels, in the run's order.
        trained: whether the run has a trainer; without one it is published alone.
        planned: time in nanoseconds: no two orders are the same file to Snakemake.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    kind: str
    run: str
    manifest: str
    lock: str
    output: str
    datasets: dict[str, Dataset]
    resolutions: list[tuple[int, int]]
    model_name: str
    model: Model
    trained: bool = True
    trainer: MusubiTrainer | SdScriptsTrainer
    publish: Publish
    planned: int = 0

    @abstractmethod
    def settings_digest(self) -> str:
        """Return the digest of all settings that shape the trained weights."""

    def write(self) -> Path:
        """Write the order, and return its path."""
        path = run_order(self.run, "train", self.planned)
        atomic.write(path, self.model_dump_json().encode())
        return path


def fields_of(config: Config, name: str) -> dict[str, Any]:
    """Return the fields of a run's order that all external trainers share, but kind and trainer."""
    run, folder = config.runs[name], run_folder(name)
    return {
        "run": name,
        "manifest": str(folder / "manifest.jsonl"),
        "lock": str(folder / "dataset.lock"),
        "output": str(folder),
        "datasets": {dataset: config.datasets[dataset] for dataset in run.datasets},
        "resolutions": [(size.width, size.height) for size in run.resolutions],
        "model_name": run.model,
        "model": config.models[run.model],
        "publish": config.publish,
        "planned": time.time_ns(),
    }
