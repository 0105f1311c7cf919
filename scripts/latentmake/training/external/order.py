"""Order of a run of an external trainer, for training, checklist and publication."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict

from latentmake.config.datasets import Dataset
from latentmake.config.external_trainers import MusubiTrainer, SdScriptsTrainer, flags_of
from latentmake.config.machines import Publish
from latentmake.config.models import Model
from latentmake.config.root import Config
from latentmake.config.rows import Setting
from latentmake.files import atomic
from latentmake.plan.lock import run_folder
from latentmake.plan.orders import run_order
from latentmake.training.order import Basis, Wanted

# Keys whose defaults were those of their fields before each architecture had its own.
_RENEWED = frozenset(
    ("gradient_checkpointing", "learning_rate", "network_alpha", "network_dim", "seed")
)


class ExternalOrder(BaseModel, ABC):
    """Fields that all external trainers share; paths are relative to the working directory.

    Attributes:
        manifest: JSONL file, one line an item with the paths of its caches.
        lock: file with the digest of what the manifest names.
        output: folder that gets what is trained.
        datasets: name -> its section of the configuration, in the run's order.
        resolutions: (width, height) in pixels, in the run's order.
        trained: whether the run has a trainer; without one it is published alone.
        trainer: its section, with the defaults of the architecture's guide.
        defaults: those defaults: keys, and further flags of the training script.
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
    defaults: dict[str, Setting] = {}
    publish: Publish
    planned: int = 0

    @abstractmethod
    def settings_digest(self) -> str:
        """Return the digest of all settings that shape the trained weights."""

    @abstractmethod
    def settings(self) -> dict[str, object]:
        """Return the same by name."""

    def basis(self, wanted: Wanted) -> Basis:
        """Return what weights of these digests come from."""
        model = self.model
        places = filter(None, (model.dit, model.dit_high_noise, model.checkpoint))
        return Basis.of(self.run, wanted, self.settings(), ", ".join(map(str, places)))

    @property
    def flags(self) -> dict[str, Setting]:
        """Flags of the training script that the guide decides, with their values."""
        return {key: value for key, value in self.defaults.items() if key.startswith("--")}

    def earlier(self) -> Self:
        """Return the order with the defaults of releases that had each key's own."""
        fields = type(self.trainer).model_fields
        old = {key: fields[key].default for key in _RENEWED & self.defaults.keys()}
        trainer = self.trainer.model_copy(update=old)
        return self.model_copy(update={"trainer": trainer, "defaults": {}})

    def described(self) -> str:
        """Return a line for the plan about the defaults; "" where the user sets all of them."""
        words = [_words(key.removeprefix("--"), value) for key, value in self.defaults.items()]
        known = ", ".join(filter(None, words))
        return known and f"training of {self.run}: by the guide of {self.model.title}: {known}"

    @property
    def path(self) -> Path:
        """Path of its file."""
        return run_order(self.run, "train", self.planned)

    def write(self) -> Path:
        """Write the order, and return its path."""
        atomic.write(self.path, self.model_dump_json().encode())
        return self.path


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


def with_defaults(
    trainer: MusubiTrainer | SdScriptsTrainer, recommended: Mapping[str, Setting]
) -> dict[str, Any]:
    """Return the fields of a run's order that hold its trainer's settings.

    Args:
        trainer: the section as the user wrote it; its keys and arguments win.
        recommended: keys and flags of the architecture's guide.
    """
    given = {*flags_of(trainer.arguments), *(f"--{key}" for key in trainer.model_fields_set)}
    if not trainer.optimizer_type.lower().startswith("adamw"):
        given.add("--optimizer_args")  # those of the guides are AdamW's
    found = {
        key: value
        for key, value in recommended.items()
        if f"--{key.removeprefix('--')}" not in given
    }
    alpha, rank = found.get("network_alpha"), recommended.get("network_dim")
    if isinstance(alpha, float) and alpha > 1 and isinstance(rank, int):  # a share of its rank
        own = rank if "network_dim" in found else trainer.network_dim
        found["network_alpha"] = alpha * own / rank
    keys = {key: value for key, value in found.items() if not key.startswith("--")}
    return {"trainer": trainer.model_copy(update=keys), "defaults": found}


def _words(key: str, value: Setting) -> str:
    """Return a default as the plan shows it; "" where the trainer decides."""
    if value is None or isinstance(value, bool):
        return key if value else ""
    if isinstance(value, list):
        return " ".join([key, *value])
    return f"{key} {value if isinstance(value, str) else f'{value:g}'}"
