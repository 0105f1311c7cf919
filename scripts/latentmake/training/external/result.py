"""Result of an external trainer: its files, record and receipt.

Quick to import, since planning reads the record too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from pydantic import Field

from latentmake.errors import ModelError
from latentmake.plan.reasons import Difference
from latentmake.training.external.order import ExternalOrder
from latentmake.training.json_file import JsonFile
from latentmake.training.order import Wanted

_VERSION = 2  # of trainings with the defaults of their guides


class RunFiles:
    """The files below a run's output folder; the result is a LoRA, or a complete network.

    Attributes:
        lora: the trained LoRA, under this name only once it is complete.
        record: of the LoRA; written after it.
        work: the trainer's own output folder: LoRAs and states of epochs, and its last LoRA.
        trained: the trainer's last LoRA.
        progress: what the states in `work` belong to.
        earlier: results of an earlier training, until there are new ones.
        resumed: the states that a training was resumed from.
        logs: TensorBoard scalars.
    """

    def __init__(self, order: ExternalOrder) -> None:
        self.run, self.output = order.run, Path(order.output)
        self.lora = self.output / f"{self.run}.safetensors"
        self.record = self.output / "training.json"
        self.work = self.output / "output"
        self.trained = self.work / f"{self.run}.safetensors"
        self.progress = self.work / "wanted.json"
        self.earlier = self.work / "previous"
        self.resumed = self.work / "resumed"
        self.logs = self.output / "logs"


class Record(JsonFile):
    """Origin of a LoRA, whose path is `weights`; `seconds` counts no killed training.

    `files` has its name in the run's folder and its SHA-256; it is empty in earlier releases.
    """

    wanted: Wanted
    weights: str
    seconds: float
    files: dict[str, str] = Field({})


class Receipt(Record):
    """Record with the run's name, for the build."""

    run: str


def wanted(order: ExternalOrder, data: str, weights: str, record: Record | None = None) -> Wanted:
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
    record = Record.read(files.record)
    was = None if record is None else record.wanted
    known, data = (was.weights, lock or was.data) if was else ("", "")
    want = wanted(order, data, known, record)
    if was != want:
        return order.basis(want).differences(files.output, was)
    if lock is None:
        return []
    needed = (files.lora, files.output / "trained.json")
    if missing := [Difference(f"{path} is missing") for path in needed if not path.is_file()]:
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
