"""Order, lock, captions, files and records of a training, for all trainers.

The planner writes the order without importing torch. The trainer reads the order, and the manifest
and lock that it names, and no other file of the plan. A record beside the trained weights has the
digests of everything that shaped them. While they equal the digests of the order, there is nothing
to train. This module does not import torch, because launcher and planner compare these digests.
"""

from __future__ import annotations

import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic_core import to_json

from latentmake.base import atomic, digest, state_file
from latentmake.base.errors import CacheError, TrainingError, storage_error
from latentmake.base.machine import duration
from latentmake.base.state_file import JsonFile, is_damaged, read_state
from latentmake.formats.safetensors import read_head
from latentmake.plan.manifest import LEAVING, PREVIOUS, Lock, lock_at, read_lock, run_folder
from latentmake.plan.orders import run_order
from latentmake.plan.product import (
    Difference,
    short,
    text_of,
    value_differences,
)
from latentmake.plan.receipts import Amount
from latentmake.training.seen import SEEN, write_seen

BASIS = "trained_on.json"
_RECEIPT = "trained.json"
_FOLDERS = {"generate": "generated", "evaluate": "evaluation"}
_PAGES = ("report", "captions", "compare", "evaluate")
_VALUES = TypeAdapter(dict[str, Any])  # content of a receipt, see `finish`
_Order = TypeVar("_Order", bound=BaseModel)


class Wanted(JsonFile):
    """Digests of everything that shapes trained weights.

    Attributes:
        data: digest of the manifest's caches.
        settings: digest of all settings that shape the weights.
        weights: digest of the network that is trained, and of its noise schedule.
        resumed: digest of another training's checkpoint, from which a training of an earlier
            release began; "" for none.
        version: version of the trainer; a record without it has version 1.
    """

    data: str
    settings: str
    weights: str
    resumed: str = ""
    version: int = 1


class Origin(JsonFile, extra="ignore"):
    """Digests in any record, index of pictures or note on states; other keys are ignored."""

    wanted: Wanted


class Forced(Origin):
    """Mark in a run's folder that a forced training has not ended.

    Attributes:
        planned: time of its order, see `RunOrder`.
    """

    planned: int


class Basis(JsonFile):
    """Named values that shaped trained weights, in a file beside them.

    They explain why a run is trained again; only the digests decide whether it is.

    Attributes:
        wanted: digests that decide.
        settings: settings of the trainer that shape the weights, by name.
        data: digests in the lock, by name.
        network: place of the network.
    """

    wanted: Wanted
    settings: dict[str, str]
    data: dict[str, str]
    network: str

    def differences(
        self, folder: Path, was: Wanted | None, chosen: Iterable[str] = ()
    ) -> list[Difference]:
        """Return the differences from the last training.

        Records of earlier releases may have only digests, or lack today's settings. A setting that
        the record lacks is a difference only if it is `chosen`.

        Args:
            folder: folder of the last result.
            was: digests in its record; None if there is no record.
            chosen: names of the settings that are not at their defaults.
        """
        if was is None:
            return [Difference("it has not been trained yet")]
        now, last = self.wanted, Basis.read(folder / BASIS)
        old = last if last and last.wanted == was else self.model_copy(update={"network": ""})
        gone = {key: value for key, value in old.settings.items() if key not in self.settings}
        named = {*old.settings, *chosen}
        settings = {key: value for key, value in self.settings.items() if key in named} | gone
        reasons = []
        if was.data != now.data:
            digests = Difference("dataset's digest", short(was.data), short(now.data))
            reasons += value_differences(old.data, self.data) or [digests]
        if was.settings != now.settings:
            digests = Difference("settings' digest", short(was.settings), short(now.settings))
            reasons += value_differences(old.settings, settings) or [digests]
        if was.weights != now.weights:
            ends = [f" ({place})" if place else "" for place in (old.network, self.network)]
            networks = short(was.weights) + ends[0], short(now.weights) + ends[1]
            reasons.append(Difference("network's digest", *networks))
        return reasons + value_differences(
            {"version of the trainer": was.version}, {"version of the trainer": now.version}
        )


class RunOrder(BaseModel, ABC):
    """Order of a training; paths are relative to the working directory.

    Attributes:
        kind: kind of the trainer.
        run: name of the run.
        manifest: path of the JSONL file that has one line for each item, with its caches.
        lock: path of the file with the digest of these caches, see `Lock`.
        output: folder of all files that the training writes.
        planned: time of the plan in nanoseconds; because of it, Snakemake takes no two orders for
            the same file.
        forced: whether the run is trained from the start even if its weights are up to date.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    kind: str
    run: str
    manifest: str
    lock: str
    output: str
    planned: int = 0
    forced: bool = False

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

    def force(self, forced: Collection[str]) -> tuple[Self, list[Difference]]:
        """Return the order, and the reason to train if the command forces it.

        `forced` is `Facts.forced`.
        """
        if f"train_{self.run}" not in forced:
            return self, []
        last = AnyRecord.read(RunFiles(self).finished.record)
        took = f"; the last one took {duration(last.seconds / 60)}" if last and last.seconds else ""
        return self.model_copy(update={"forced": True}), [Difference(f"forced{took}")]

    def basis(self, wanted: Wanted) -> Basis:
        """Return the named values behind these digests, with the run's lock as it is now."""
        settings, data = (
            {name: text_of(value) for name, value in values.items()}
            for values in (self.settings(), read_lock(self.run).data_values())
        )
        network = ", ".join(map(str, self.networks()))
        return Basis(wanted=wanted, settings=settings, data=data, network=network)

    @property
    def path(self) -> Path:
        """Path of the order's file."""
        return run_order(self.run, "train", self.planned)

    def write(self) -> Path:
        """Write the order, and return its path.

        A damaged record of trained weights is repaired from the receipt, if possible.
        """
        place = RunFiles(self).record
        for kind in (Record, LaunchedRecord):
            # Now, not in the job: Snakemake deletes the receipt before the job starts.
            if (record := kind.read(place)) is not None and is_damaged(place):
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
    if (lock := lock_at(Path(path))).digest:
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
"""File in a copy of trained weights that has the digests of what shaped them."""


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
        self.record = self.output / "training.json"  # a `Record` or `LaunchedRecord`
        self.receipt = self.output / _RECEIPT  # the build's receipt, written last
        self.basis = self.output / BASIS
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
        self.progress = self.work / "wanted.json"  # digests of the training of those states
        self.resumed = self.work / "resumed"  # states from which a training was resumed
        self.previous = self.output / PREVIOUS  # the previous result, see `training.previous`
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

    def holder(self, want: Wanted) -> RunFiles | None:
        """Return the files of a present or previous result with the digests `want`, else None."""
        before = () if self.is_forced(want) else self.before()
        return next((files for files in (self, *before) if files.came_from(want)), None)

    def is_forced(self, want: Wanted) -> bool:
        """Whether a forced training with the digests `want` has not ended.

        A previous result then does not replace it.
        """
        mark = Origin.read(self.forced)
        return mark is not None and mark.wanted == want

    def came_from(self, want: Wanted) -> bool:
        """Whether the result is complete and has the digests `want`."""
        origin = Origin.read(self.record)
        fits = origin is not None and origin.wanted == want
        return fits and all(path.is_file() for path in self.results)

    def trained(self, want: Wanted) -> Record | None:
        """Return the record of the trained weights if they have the digests `want`, else None."""
        return Record.read(self.record) if self.came_from(want) else None

    def outputs(self, word: str, *, finished: bool) -> dict[Path, str]:
        """Return files and their captions, see `Backend.outputs`."""
        always = [*self.results, self.record, self.basis] if word == "train" else []
        captions = {self.grid: "samples", self.curves: "curves"}
        captions |= dict.fromkeys((self.record, self.basis), "provenance")
        made: list[Path] = []
        if finished and word == "train":
            recorded = AnyRecord.read(self.record)
            made += [self.output / name for name in (recorded.files if recorded else ())]
            made += [self.grid, self.curves, self.prompts, self.output / SEEN]
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

    def missing(self) -> list[Difference]:
        """Return a reason to run the training's job for each missing or damaged file of the result.

        If the weights are up to date, the job does not train: it only writes these files.
        """
        needed = (*self.results, self.receipt)
        missing = [Difference(f"{path} is missing") for path in needed if not path.is_file()]
        Basis.read(self.basis)  # so that `is_damaged` knows about it
        damaged = filter(is_damaged, (self.record, self.basis))
        return missing + [Difference(f"{path} is damaged") for path in damaged]


def last_place(path: Path) -> Path:
    """Return the present path of a result's file, which may have been moved to `previous`."""
    if path.exists():
        return path
    runs = (folder for folder in path.parents if (folder / PREVIOUS / "training.json").is_file())
    moved = (folder / PREVIOUS / path.relative_to(folder) for folder in runs)
    return next((place for place in moved if place.exists()), path)


class _Recorded(JsonFile):
    """A record beside trained weights; the receipt of its build has the same content."""

    @classmethod
    def read(cls, path: Path) -> Self | None:
        """Return a record. If it is damaged, return its copy in the receipt.

        The copy counts only if the files of the weights have the digests that it names.
        """

        def parse(data: bytes) -> list[Self]:
            try:
                return [cls.model_validate_json(data)]
            except ValidationError:
                # Another kind of trainer may have written the record: then it is not damaged.
                for other in (Record, LaunchedRecord):
                    with suppress(ValidationError):
                        other.model_validate_json(data)
                        return []
                raise

        parsed: list[Self] | None = read_state(path, parse)
        if parsed is not None or not is_damaged(path):
            return parsed[0] if parsed else None
        values = read_state(path.with_name(_RECEIPT), _VALUES.validate_json) or {}
        try:
            copy = cls(**{name: values[name] for name in cls.model_fields if name in values})
            files = copy.model_dump()["files"].items()
            same = [digest.of_file(path.parent / name) == recorded for name, recorded in files]
        except (OSError, ValueError):
            return None
        return copy if same and all(same) else None


class Record(_Recorded, extra="ignore"):  # earlier releases write more
    """Origin of trained weights, and their losses; kept beside them.

    Attributes:
        loss_start: mean squared error over fixed noise and timesteps, before the training.
        loss_end: the same error after the training.
        seconds: time spent on steps, without steps that a killed training lost.
        mixed_precision: precision of the training; "" in records of earlier releases.
        files: path of each file of trained weights below the run's folder -> its SHA-256; empty in
            records of earlier releases.
    """

    wanted: Wanted
    steps: int
    loss_start: float
    loss_end: float
    seconds: Amount
    mixed_precision: str = ""
    files: dict[str, str] = Field({})


class LaunchedRecord(_Recorded):
    """Origin of weights that a launched trainer wrote, with their path; see `Record`."""

    wanted: Wanted
    weights: str
    seconds: Amount
    files: dict[str, str] = Field({})


class AnyRecord(_Recorded, extra="ignore"):
    """Fields of a `Record` or `LaunchedRecord` that pages and checks read."""

    steps: int | None = None
    loss_start: float | None = None
    loss_end: float | None = None
    seconds: Amount | None = None
    files: dict[str, str] = Field({})


def trained_files(run: str) -> tuple[Path, dict[str, str]]:
    """Return the path of a run's record, and its files.

    The files are a dictionary: path below the run's folder -> digest.
    """
    path = run_folder(run) / "training.json"
    record = AnyRecord.read(path)
    return path, {} if record is None else record.files


def finish(order: RunOrder, record: Record | LaunchedRecord, receipt: Path, **more: object) -> None:
    """Write the items and values that shaped the trained weights, and the receipt.

    The receipt has the content of the record, and `more`.
    """
    files = RunFiles(order)
    write_seen(Path(order.manifest), files.output)
    order.basis(record.wanted).write(files.basis)
    content: dict[str, Any] = {"run": order.run, "weights": str(files.weights)}
    atomic.write(receipt, to_json(content | record.model_dump() | more, indent=2) + b"\n")
    files.forced.unlink(missing_ok=True)


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
    digests = {}
    for place in (files.output / name for name in sorted(names)):
        for path in sorted(place.rglob("*")) if place.is_dir() else [place]:
            if path.is_file():
                name = path.relative_to(files.output).as_posix()
                digests[name] = digest.of_file(path, quiet=True)
    record.model_copy(update={"files": digests}).write(files.record)
