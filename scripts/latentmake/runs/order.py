"""Order, lock, captions, files and records of a training, for all trainers.

The planner writes the order without importing torch. The trainer reads the order, and the manifest
and lock that it names, and no other file of the plan. A record beside the trained weights has the
parts that they were made of. While they equal the parts of the order, there is nothing to train.
This module does not import torch, because launcher and planner compare these parts.
"""

from __future__ import annotations

import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any, ClassVar, Self, TypeAlias, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from latentmake.base import atomic, digest, state_file
from latentmake.base.errors import CacheError, TrainingError, storage_error
from latentmake.base.machine import duration
from latentmake.base.state_file import is_damaged
from latentmake.formats.safetensors import read_head
from latentmake.plan.estimates import Amount
from latentmake.plan.manifest import LEAVING, PREVIOUS, Lock, read_lock, run_folder
from latentmake.plan.orders import run_order
from latentmake.plan.product import Difference, Made, Parts, Product, judge, text_of

TrainedParts: TypeAlias = Parts
"""Parts of trained weights: digests of dataset, settings and network, and `VERSION`."""
VERSION = "version of the trainer"
"""Part of trained weights: version of the trainer."""
RECORD = "training.json"
_RECEIPT = "trained.json"
_FOLDERS = {"generate": "generated", "evaluate": "evaluation"}
_PAGES = ("report", "captions", "compare", "evaluate")
_Order = TypeVar("_Order", bound=BaseModel)


class Forced(Made):
    """Mark in a run's folder that a forced training of these parts has not ended.

    Attributes:
        planned: time of its order, see `RunOrder`.
    """

    planned: int


class Record(Made):
    """Record beside trained weights; the receipt of its build has the same content.

    Attributes:
        steps: number of steps; None if a launched trainer does not print it, like the losses.
        loss_start: mean squared error over fixed noise and timesteps, before the training.
        loss_end: the same error after the training; a launched trainer's last mean loss.
        seconds: time spent on steps, without steps that a killed training lost.
        mixed_precision: precision of the training; "" in records of earlier releases.
        roster: digest of the roster, see `runs.history`; "" in records of earlier releases.
        began: Unix time of the first start, in seconds.
        ended: why the training has not finished; "" if it has.
        device: name of the device, such as `cpu`; "" in records of earlier releases.
        memory: peak of the device's memory in bytes; 0 if unknown.
        held_out: mean loss of the held-out items after the training; None if there are none.
        files: path of each file of trained weights below the run's folder -> its SHA-256; empty in
            records of earlier releases.
    """

    steps: int | None = None
    loss_start: float | None = None
    loss_end: float | None = None
    seconds: Amount
    mixed_precision: str = ""
    roster: str = ""
    began: Amount = 0
    ended: str = ""
    device: str = ""
    memory: Amount = 0
    held_out: float | None = None
    files: dict[str, str] = Field({})

    @classmethod
    def read(cls, path: Path) -> Self | None:
        """Return the record at a path. If it is damaged, return its copy in the receipt.

        The copy counts only if the files of the weights have the digests that it names.
        """
        record = super().read(path)
        if record is None and is_damaged(path):
            record = cls._copy(path)
        if record is None or record.values:
            return record
        from latentmake.plan import earlier

        return record.model_copy(update=earlier.named_values(path.parent, record.parts))

    @classmethod
    def _copy(cls, path: Path) -> Self | None:
        copy = super().read(path.with_name(_RECEIPT))
        files = copy.files.items() if copy else ()
        try:
            same = [digest.of_file(path.parent / name) == recorded for name, recorded in files]
        except OSError:
            return None
        return copy if same and all(same) else None

    @property
    def dataset(self) -> str:
        """Digest of the training data; "" if the record has none."""
        return str(self.parts.get("dataset", ""))


class RunOrder(BaseModel, ABC):
    """Order of a training; paths are relative to the working directory.

    Attributes:
        version: version of the trainer, raised when it would train other weights from the same
            order, or when a default changes.
        kind: kind of the trainer.
        run: name of the run.
        manifest: path of the JSONL file that has one line for each item, with its caches.
        lock: path of the file with the digest of these caches, see `Lock`.
        output: folder of all files that the training writes.
        planned: time of the plan in nanoseconds; because of it, Snakemake takes no two orders for
            the same file.
        forced: whether the run is trained from the start even if its weights are up to date.
        keep: number of trainings in the run's history; 0 for a trial, which is not remembered.
        weights: digest of the networks that are trained; "" until it is computed.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    version: ClassVar[int] = 1
    kind: str
    run: str
    manifest: str
    lock: str
    output: str
    planned: int = 0
    forced: bool = False
    keep: int = 50
    weights: str = ""

    @property
    @abstractmethod
    def results(self) -> list[str]:
        """Paths of all files of weights that the training writes, below `output`."""

    @abstractmethod
    def settings_digest(self) -> str:
        """Return the digest of all settings that shape the trained weights."""

    @abstractmethod
    def settings(self) -> dict[str, object]:
        """Return all settings that shape the trained weights, by name."""

    @abstractmethod
    def networks(self) -> Iterable[object]:
        """Return the places of the networks that are trained, for messages."""

    def chosen(self) -> Iterable[str]:
        """Return the names of settings that the user set. They count if a record lacks them."""
        return ()

    def force(self, forced: Collection[str]) -> tuple[Self, list[Difference]]:
        """Return the order, and the reason to train if the command forces it.

        `forced` is `Facts.forced`.
        """
        if f"train_{self.run}" not in forced:
            return self, []
        last = Record.read(RunFiles(self).finished.record)
        took = f"; the last one took {duration(last.seconds / 60)}" if last and last.seconds else ""
        return self.model_copy(update={"forced": True}), [Difference(f"forced{took}")]

    def product(self, parts: TrainedParts, last: Record | None = None) -> Product:
        """Return the trained weights as a product, with the run's lock as it is now.

        Args:
            parts: digests of everything that shapes the weights.
            last: record of the last training. Settings that it has and today's release lacks are no
                difference. Settings that it lacks are one only if the user set them.
        """
        settings, data = (
            {name: text_of(value) for name, value in values.items()}
            for values in (self.settings(), read_lock(self.run).data_values())
        )
        if last is not None:
            old = last.values.get("settings", {})
            named = {*old, *self.chosen()}
            settings = old | {name: value for name, value in settings.items() if name in named}
        files = RunFiles(self)
        return Product(
            absent="it has not been trained yet",
            parts=parts,
            values={"dataset": data, "settings": settings},
            places={"network": ", ".join(map(str, self.networks()))},
            files=[*files.results, files.receipt],
        )

    def wanted(self, data: str | None = None) -> TrainedParts:
        """Return the parts that trained weights must have to be up to date with this order.

        `data` is the digest of the run's caches; by default the digest in its lock, see `lock_of`.
        """
        return {
            "dataset": lock_of(self.lock).data if data is None else data,
            "settings": self.settings_digest(),
            "network": self.weights,
            VERSION: self.version,
        }

    def like(self, last: Record, data: str) -> Self:
        """Return the order with the values that the last training chose for settings."""
        del last, data
        return self

    def product_since(self, last: Record, data: str) -> Product:
        """Return the weights as they would be trained now, to compare them with a record.

        `data` is the digest of the run's caches.
        """
        order = self.like(last, data)
        return order.product(order.wanted(data), last)

    def reasons(self, lock: str | None) -> list[Difference]:
        """Return why the run must be trained, or its job must write files again.

        If the weights are up to date, the job does not train: it only writes missing files.

        Args:
            lock: digest of the run's caches; None if some are outdated, which is a reason already.
        """
        last = Record.read(RunFiles(self).finished.record)
        if last:
            product = self.product_since(last, lock or last.dataset)
        else:
            product = self.product(self.wanted(lock or ""))
        differences = judge(product, last)
        damaged = filter(is_damaged, [RunFiles(self).record])
        return differences or [Difference(f"{path} is damaged") for path in damaged]

    @property
    def path(self) -> Path:
        """Path of the order's file."""
        return run_order(self.run, "train", self.planned)

    def write(self) -> Path:
        """Write the order, and return its path.

        A damaged record of trained weights is repaired from the receipt, if possible.
        """
        place = RunFiles(self).record
        # Now, not in the job: Snakemake deletes the receipt before the job starts.
        if (record := Record.read(place)) is not None and is_damaged(place):
            record.write(place)
        atomic.write(self.path, self.model_dump_json().encode())
        return self.path


def run_values(run: str) -> dict[str, Any]:
    """Return the fields of a `RunOrder` that is planned now, except its kind."""
    folder = run_folder(run)
    return {
        "run": run,
        "manifest": str(folder / "manifest.jsonl"),
        "lock": str(folder / "dataset.lock"),
        "output": str(folder),
        "planned": time.time_ns(),
    }


def read_order(path: Path, kind: type[_Order]) -> _Order:
    """Read the order of a training, of clips or of an evaluation.

    Raises:
        StorageError: the file is missing, or a user has changed it so that it is no order.
    """
    return state_file.read_order(path, kind.model_validate_json)


def lock_of(path: str) -> Lock:
    """Read the `dataset.lock` of a run's caches; raises TrainingError."""
    if (lock := Lock.read(Path(path))) is not None and lock.digest:
        return lock
    hint = "delete it, and run the build's command again"
    raise TrainingError("the lock of the run's caches is missing or damaged", where=path, hint=hint)


def caption_in(path: str) -> str:
    """Return the caption in the header of a text cache, in our layout or musubi-tuner's."""
    try:
        metadata = read_head(Path(path)).metadata
    except (OSError, ValueError) as error:
        what = f"this cache file cannot be read ({error})"
        hint = "delete it and run the build's command again, which encodes it anew"
        raise CacheError(what, where=path, hint=hint) from None
    return (metadata.get("caption") or metadata.get("caption1") or "").strip()


def taken_back(run: str) -> str:
    """Return the message about a training whose result is a previous one."""
    return f"training of {run}: takes back the previous result, which was trained on exactly this"


COPIED = "wanted.json"
"""File with copies of trained weights, or states, that has the parts of their training."""
PROGRESS = "progress.json"
"""File in a checkpoint that has the parts of its training, and how far it came."""


class States(Made):
    """File beside a launched trainer's states: parts of their training.

    Attributes:
        epochs: epochs that were done before its last start.
    """

    epochs: int = Field(0, ge=0, lt=10**6)


def write_parts(path: Path, parts: TrainedParts) -> None:
    """Write a record that has only the parts of a training; raises StorageError."""
    Made(parts=parts).write(path)


def parts_in(path: Path) -> TrainedParts | None:
    """Return the parts in any record, or None if it is missing or damaged."""
    made = Made.read(path)
    return None if made is None else made.parts


class RunFiles:
    """Paths of the files of a run, below its output folder or another `folder` with a result."""

    def __init__(self, order: RunOrder, folder: Path | None = None) -> None:
        self._order = order
        self.run, self.output = order.run, folder or Path(order.output)
        # Weights get these names when they are complete, and the record is written after them. So
        # a record means that the weights beside it are complete.
        self.names = order.results
        self.results = [self.output / name for name in self.names]
        self.weights = self.results[0]
        self.record = self.output / RECORD  # a `Record`
        self.receipt = self.output / _RECEIPT  # the build's receipt, written last
        self.logs = self.output / "logs"  # TensorBoard's files
        self.samples = self.output / "samples"  # sample pictures and their index
        self.grid = self.output / "samples.png"  # all sample pictures in one
        self.curves = self.output / "curves.png"  # curves of loss, learning rate and so on
        self.checkpoints = self.output / "checkpoints"  # one folder for each
        self.saved = self.output / "saved"  # copies of the weights, one folder for each step
        self.save = self.output / "save"  # file by which a user requests such a copy at once
        self.prompts = self.output / "prompts.txt"  # sample prompts for a launched trainer
        self.work = self.output / "output"  # a launched trainer's own weights and states
        self.last = self.work / self.weights.name  # the launched trainer's last weights
        self.progress = self.work / COPIED  # a `States`
        self.resumed = self.work / "resumed"  # states from which a training was resumed
        self.previous = self.output / PREVIOUS  # the previous result, see `training.previous`
        self.history = self.output / "history"  # see `runs.history`
        self.forced = self.output / "forced.json"  # a `Forced`

    def at(self, folder: Path) -> RunFiles:
        """Return the files of a result in another folder."""
        return RunFiles(self._order, folder)

    def before(self) -> Iterator[RunFiles]:
        """Yield the files of the previous result, then of the one before it, if they exist."""
        place = self.previous
        while place.is_dir():
            yield self.at(place)
            place /= PREVIOUS

    @property
    def finished(self) -> RunFiles:
        """Files of the last finished result, see `plan.manifest.result_folder`."""
        places = self, self.at(self.output / LEAVING), self.at(self.previous)
        return next((files for files in places if files.record.is_file()), self)

    def holder(self, want: TrainedParts) -> RunFiles | None:
        """Return the files of a present or previous result with the parts `want`, else None."""
        before = () if self.is_forced(want) else self.before()
        return next((files for files in (self, *before) if files.came_from(want)), None)

    def is_forced(self, want: TrainedParts) -> bool:
        """Whether a forced training with the parts `want` has not ended.

        A previous result then does not replace it.
        """
        return parts_in(self.forced) == want

    def came_from(self, want: TrainedParts) -> bool:
        """Whether the result is complete and has the parts `want`."""
        return parts_in(self.record) == want and self.is_complete

    @property
    def is_complete(self) -> bool:
        """Whether all files of the trained weights exist."""
        return all(path.is_file() for path in self.results)

    def trained(self, want: TrainedParts) -> Record | None:
        """Return the record of the trained weights if they have the parts `want`, else None."""
        return Record.read(self.record) if self.came_from(want) else None

    def outputs(self, word: str, *, finished: bool) -> dict[Path, str]:
        """Return the files that `train`, `generate` or `evaluate` makes, with their captions.

        Args:
            word: `train`, `generate` or `evaluate`; `pages` for further files that a report shows.
            finished: whether the job has ended. If so, all files that it made are returned, else
                only the files that it makes in any case.

        Returns:
            Path -> caption in Snakemake's report; "" for files that the report does not show.
        """
        always = [*self.results, self.record] if word == "train" else []
        captions = {self.grid: "samples", self.curves: "curves", self.record: "provenance"}
        made: list[Path] = []
        if finished and word == "train":
            recorded = Record.read(self.record)
            made += [self.output / name for name in (recorded.files if recorded else ())]
            made += [self.grid, self.curves, self.prompts]
            for folder in (self.samples, self.logs, self.saved, self.checkpoints, self.work):
                made += sorted(folder.rglob("*"))
        elif finished and word == "pages":
            pages = [Path(f"reports/{page}_{self.run}.html") for page in _PAGES]
            captions = dict.fromkeys(pages, "page")
            captions |= dict.fromkeys(sorted(self.output.glob("generated/*_*")), "generated")
            made += captions
        elif finished:
            made += sorted((self.output / _FOLDERS[word]).rglob("*"))
        there = [path for path in dict.fromkeys([*always, *made]) if path.is_file() or not finished]
        return {path: captions.get(path, "") for path in there}


def last_place(path: Path) -> Path:
    """Return the present path of a result's file, which may have been moved to `previous`."""
    if path.exists():
        return path
    runs = (folder for folder in path.parents if (folder / PREVIOUS / RECORD).is_file())
    moved = (folder / PREVIOUS / path.relative_to(folder) for folder in runs)
    return next((place for place in moved if place.exists()), path)


def trained_files(run: str) -> tuple[Path, dict[str, str]]:
    """Return the path of a run's record, and its files.

    The files are a dictionary: path below the run's folder -> digest.
    """
    path = run_folder(run) / RECORD
    record = Record.read(path)
    return path, {} if record is None else record.files


def write_trained(
    write: Callable[[Path], object], record: Record, files: RunFiles, names: Iterable[str]
) -> None:
    """Write the trained weights, then their record with the digests of their files.

    Args:
        write: function that writes the weights into a new folder.
        record: record, still without the digests.
        files: files of the run.
        names: names of all files and folders that a training of this kind may write there. They are
            all replaced, also those of an incomplete result.
    """
    new = files.output / f".new{atomic.TEMPORARY_SUFFIX}"
    try:
        write(new)
        # A killed process must not leave the old record beside new weights.
        files.record.unlink(missing_ok=True)
        for name in names:
            path = files.output / name
            atomic.remove(path)
            if (new / name).exists():
                (new / name).rename(path)
    except OSError as error:
        raise storage_error(error, files.output) or error from None
    finally:
        shutil.rmtree(new, ignore_errors=True)
    record.model_copy(update={"files": digests_in(files.output, names)}).write(files.record)


def digests_in(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """Return path below a folder -> digest, of all files in it with these names or below them."""
    digests = {}
    for place in (folder / name for name in sorted(names)):
        for path in sorted(place.rglob("*")) if place.is_dir() else [place]:
            if path.is_file():
                digests[path.relative_to(folder).as_posix()] = digest.of_file(path, quiet=True)
    return digests
