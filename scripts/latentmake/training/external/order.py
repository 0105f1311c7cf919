"""Order of a run of an external trainer, for training, checklist and publication; its digests."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Self

from pydantic import Field

from latentmake.config.architectures import Setting
from latentmake.config.datasets import Dataset
from latentmake.config.external_trainers import MusubiTrainer, SdScriptsTrainer, flags_of
from latentmake.config.machines import Publish
from latentmake.config.models import Model
from latentmake.config.root import Config
from latentmake.errors import ModelError
from latentmake.plan.state import Difference
from latentmake.training.order import LaunchedRecord, RunFiles, RunOrder, Wanted, run_values

_VERSION = 2  # of trainings with the defaults of their guides

# Keys whose defaults were those of their fields before each architecture had its own.
_RENEWED = frozenset(
    ("gradient_checkpointing", "learning_rate", "network_alpha", "network_dim", "seed")
)


class ExternalOrder(RunOrder):
    """Fields that all external trainers share.

    Attributes:
        datasets: name -> its section of the configuration, in the run's order.
        resolutions: (width, height) in pixels, in the run's order.
        trained: whether the run has a trainer; without one it is published alone.
        trainer: its section, with the defaults of the architecture's guide.
        defaults: those defaults: keys, and further flags of the training script.
    """

    datasets: dict[str, Dataset]
    resolutions: list[tuple[int, int]]
    model_name: str
    model: Model
    trained: bool = True
    trainer: MusubiTrainer | SdScriptsTrainer
    defaults: dict[str, Setting] = Field({})
    publish: Publish

    @property
    def results(self) -> list[str]:
        """Name of the trained weights: a LoRA, or a complete network."""
        return [f"{self.run}.safetensors"]

    def networks(self) -> Iterable[object]:
        """Return the places of the networks."""
        return filter(None, (self.model.dit, self.model.dit_high_noise, self.model.checkpoint))

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


def fields_of(config: Config, name: str) -> dict[str, Any]:
    """Return the fields of a run's order that all external trainers share, but kind and trainer."""
    run = config.runs[name]
    return {
        **run_values(name),
        "datasets": {dataset: config.datasets[dataset] for dataset in run.datasets},
        "resolutions": [(size.width, size.height) for size in run.resolutions],
        "model_name": run.model,
        "model": config.models[run.model],
        "publish": config.publish,
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


def wanted(
    order: ExternalOrder, data: str, weights: str, record: LaunchedRecord | None = None
) -> Wanted:
    """Return the digests that the result of an order must have come from.

    Args:
        order: the run.
        data: digest of its caches.
        weights: digest of the networks that are trained.
        record: of the result that is there; it stays, if a release trained it with other defaults.
    """
    settings = order.settings_digest()
    want = Wanted(data=data, settings=settings, weights=weights, version=_VERSION)
    known = {"settings": order.earlier().settings_digest(), "version": 1}
    former = want.model_copy(update=known)
    return former if record is not None and record.wanted == former else want


def reasons(order: ExternalOrder, lock: str | None, weights: Callable[[], str]) -> list[Difference]:
    """Return why a run's result is not that of its order.

    Args:
        order: the run.
        lock: digest of its caches; None where these are to be made, which is a reason of its own.
        weights: finds the digest of the networks that are trained; called last.
    """
    files = RunFiles(order)
    record = LaunchedRecord.read(files.record)
    was = None if record is None else record.wanted
    known, data = (was.weights, lock or was.data) if was else ("", "")
    want = wanted(order, data, known, record)
    if was != want:
        return order.basis(want).differences(files.output, was)
    if lock is None:
        return []
    if missing := files.missing():
        return missing
    try:
        today = want.model_copy(update={"weights": weights()})
    except ModelError as error:
        return [Difference(str(error))]  # the job says so, too
    return [] if today == was else order.basis(today).differences(files.output, was)


def files_digests(
    key: str, place: str, files: Iterable[Path], file_digest: Callable[[Path], str]
) -> list[str]:
    """Return the digests of the files of a network, which a model's key names.

    Raises:
        ModelError: they are missing or cannot be read.
    """
    try:
        found = [file_digest(file) for file in files]
    except FileNotFoundError:
        found = []
    except OSError as error:
        raise ModelError(
            f"cannot be read ({error.strerror})", where=place, hint="check the file's permissions"
        ) from None
    if not found:
        raise ModelError(f"this `{key}` does not exist", where=place, hint="correct its path")
    return found
