"""Order, lock, captions, files and records of a training, as every trainer reads them.

The planner writes the order without importing torch; the trainer reads nothing else but the
manifest and lock named in it. The digests of what trained weights came from are kept beside them:
as long as they equal those of the order, there is nothing to train. No torch here: launcher and
planner compare them.
"""

from __future__ import annotations

import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic_core import to_json

from latentmake import digest
from latentmake.errors import CacheError, TrainingError, storage_error
from latentmake.files import atomic, state_file
from latentmake.files.safetensors import read_head
from latentmake.files.state_file import is_damaged, read_state
from latentmake.files.workspace import duration
from latentmake.plan.manifest import LEAVING, PREVIOUS, Lock, lock_at, read_lock, run_folder
from latentmake.plan.orders import run_order
from latentmake.plan.receipts import Amount
from latentmake.plan.state import Difference, short, text_of, value_differences
from latentmake.training.seen import SEEN, write_seen

BASIS = "trained_on.json"
_RECEIPT = "trained.json"
_FOLDERS = {"generate": "generated", "evaluate": "evaluation"}
_PAGES = ("report", "captions", "compare", "evaluate")
_VALUES = TypeAdapter(dict[str, Any])  # of a receipt, see `finish`
_Order = TypeVar("_Order", bound=BaseModel)


class JsonFile(BaseModel):
    """A JSON file with known keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
    quiet: ClassVar[bool] = False  # whether its reader names a damaged one

    @classmethod
    def read(cls, path: Path) -> Self | None:
        """Return the content of a file; None where it is missing or damaged."""
        return read_state(path, cls.model_validate_json, quiet=cls.quiet)

    def write(self, path: Path) -> None:
        """Write the file; raises StorageError."""
        atomic.write(path, (self.model_dump_json(indent=2) + "\n").encode())


class Wanted(JsonFile):
    """Digests of everything that shapes trained weights.

    Attributes:
        data: of the manifest's caches.
        settings: of all settings that shape the weights.
        weights: of the network that is trained, and its noise schedule.
        resumed: of the checkpoint of another training that it began with, as those of earlier
            releases could; "" for none.
        version: of the trainer; a record without it is of version 1.
    """

    data: str
    settings: str
    weights: str
    resumed: str = ""
    version: int = 1


class Origin(JsonFile, extra="ignore"):
    """The digests in a record, an index of pictures or a note on states, whoever wrote it."""

    wanted: Wanted


class Forced(Origin):
    """Mark in a run's folder: a forced training, by an order planned then, has not ended."""

    planned: int


class Basis(JsonFile):
    """What trained weights came from, by name; a file beside them, which nothing depends on.

    Attributes:
        wanted: the digests that decide.
        settings: of the trainer, all that shape the weights.
        data: of the lock.
        network: place of the network.
    """

    wanted: Wanted
    settings: dict[str, str]
    data: dict[str, str]
    network: str

    def differences(
        self, folder: Path, was: Wanted | None, chosen: Iterable[str] = ()
    ) -> list[Difference]:
        """Return what differs from the last training, whose record is in a folder.

        Records of earlier releases have digests alone, or lack settings of today; of these, only
        the ones that are `chosen`, and so differ from their defaults, can be a reason.
        """
        if was is None:
            return [Difference("it has not been trained yet")]
        now, known = self.wanted, Basis.read(folder / BASIS)
        old = known if known and known.wanted == was else self.model_copy(update={"network": ""})
        gone = {key: value for key, value in old.settings.items() if key not in self.settings}
        named = {*old.settings, *chosen}
        settings = {key: value for key, value in self.settings.items() if key in named} | gone
        found = []
        if was.data != now.data:
            digests = Difference("dataset's digest", short(was.data), short(now.data))
            found += value_differences(old.data, self.data) or [digests]
        if was.settings != now.settings:
            digests = Difference("settings' digest", short(was.settings), short(now.settings))
            found += value_differences(old.settings, settings) or [digests]
        if was.weights != now.weights:
            ends = [f" ({place})" if place else "" for place in (old.network, self.network)]
            networks = short(was.weights) + ends[0], short(now.weights) + ends[1]
            found.append(Difference("network's digest", *networks))
        return found + value_differences(
            {"version of the trainer": was.version}, {"version of the trainer": now.version}
        )


class RunOrder(BaseModel, ABC):
    """Order of a training; paths are relative to the working directory.

    Attributes:
        kind: of the trainer.
        run: name of the run.
        manifest: JSONL file; one line an item with the paths of its caches.
        lock: file with the digest of the caches that the manifest names, see `Lock`.
        output: folder of all that the training writes.
        planned: time in nanoseconds: no two orders are the same file to Snakemake.
        forced: whether the run is trained from the start, though it is trained on just that.
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
        """Paths of all weights that are trained together, below `output`."""

    @abstractmethod
    def settings_digest(self) -> str:
        """Return the digest of all settings that shape the trained weights."""

    @abstractmethod
    def settings(self) -> dict[str, object]:
        """Return the same by name."""

    @abstractmethod
    def networks(self) -> Iterable[object]:
        """Return the places of what is trained, for people."""

    def force(self, forced: Collection[str]) -> tuple[Self, list[Difference]]:
        """Return the order, and why it trains if a command forces that; see `Facts.forced`."""
        if f"train_{self.run}" not in forced:
            return self, []
        last = AnyRecord.read(RunFiles(self).finished.record)
        took = f"; the last one took {duration(last.seconds / 60)}" if last and last.seconds else ""
        return self.model_copy(update={"forced": True}), [Difference(f"forced{took}")]

    def basis(self, wanted: Wanted) -> Basis:
        """Return what weights of these digests come from, by the run's lock as it is now."""
        settings, data = (
            {name: text_of(value) for name, value in each.items()}
            for each in (self.settings(), read_lock(self.run).data_values())
        )
        network = ", ".join(map(str, self.networks()))
        return Basis(wanted=wanted, settings=settings, data=data, network=network)

    @property
    def path(self) -> Path:
        """Path of its file."""
        return run_order(self.run, "train", self.planned)

    def write(self) -> Path:
        """Write the order, and return its path; a damaged record that is known is made anew."""
        place = RunFiles(self).record
        for kind in (Record, LaunchedRecord):
            # Before the job, for Snakemake deletes the receipt that has the record, too.
            if (record := kind.read(place)) is not None and is_damaged(place):
                record.write(place)
        atomic.write(self.path, self.model_dump_json().encode())
        return self.path


def run_values(run: str) -> dict[str, Any]:
    """Return the values of a `RunOrder` that is planned now, but its kind."""
    folder = run_folder(run)
    return {
        "run": run,
        "manifest": str(folder / "manifest.jsonl"),
        "lock": str(folder / "dataset.lock"),
        "output": str(folder),
        "planned": time.time_ns(),
    }


def read_order(path: Path, kind: type[_Order]) -> _Order:
    """Read an order of a training, or of what follows one, that a user may have touched.

    Raises:
        StorageError: it is missing, or not an order.
    """
    return state_file.read_order(path, kind.model_validate_json)


def lock_of(path: str) -> Lock:
    """Read the `dataset.lock` of a run's caches; raises TrainingError."""
    if (lock := lock_at(Path(path))).digest:
        return lock
    hint = "delete it, and run the build's command again"
    raise TrainingError("the lock of the run's caches is missing or damaged", where=path, hint=hint)


def caption_in(path: str) -> str:
    """Return the caption in the header of a cache file of text, in our layout or musubi-tuner's."""
    try:
        metadata = read_head(Path(path)).metadata
    except (OSError, ValueError) as error:
        what = f"this cache file cannot be read ({error})"
        hint = "delete it and run the build's command again, which encodes it anew"
        raise CacheError(what, where=path, hint=hint) from None
    return (metadata.get("caption") or metadata.get("caption1") or "").strip()


def taken_back(run: str) -> str:
    """Return the line on a training whose result is a previous one."""
    return f"training of {run}: takes back the previous result, which was trained on exactly this"


COPIED = "wanted.json"
"""In a copy of the trained weights: the digests that they came from."""


class RunFiles:
    """The files below a run's output folder, or of a result in another `folder`."""

    def __init__(self, order: RunOrder, folder: Path | None = None) -> None:
        self._order = order
        self.run, self.output = order.run, folder or Path(order.output)
        # Trained weights have these names only once they are complete; the record comes after them.
        self.names = order.results
        self.results = [self.output / name for name in self.names]
        self.weights = self.results[0]
        self.record = self.output / "training.json"  # a `Record` or `LaunchedRecord`
        self.receipt = self.output / _RECEIPT  # of the build, written last
        self.basis = self.output / BASIS
        self.logs = self.output / "logs"  # TensorBoard's files
        self.samples = self.output / "samples"  # sample pictures and their index
        self.grid = self.output / "samples.png"  # all of them as one
        self.curves = self.output / "curves.png"  # of loss, learning rate and so on
        self.checkpoints = self.output / "checkpoints"  # a folder each
        self.saved = self.output / "saved"  # copies of the weights along the way, a folder a step
        self.save = self.output / "save"  # a file by which a user asks for such a copy at once
        self.prompts = self.output / "prompts.txt"  # of the samples of a launched trainer
        self.work = self.output / "output"  # a launched trainer's own: weights, states of epochs
        self.last = self.work / self.weights.name  # its last weights
        self.progress = self.work / "wanted.json"  # what the states there belong to
        self.resumed = self.work / "resumed"  # the states that a training was resumed from
        self.previous = self.output / PREVIOUS  # the result of before, see `training.previous`
        self.forced = self.output / "forced.json"  # a `Forced`

    def at(self, folder: Path) -> RunFiles:
        """Return the files of a result in another folder."""
        return RunFiles(self._order, folder)

    def before(self) -> Iterator[RunFiles]:
        """Yield the files of the previous result, and of the one before it, if it is there."""
        place = self.previous
        while place.is_dir():
            yield self.at(place)
            place /= PREVIOUS

    @property
    def finished(self) -> RunFiles:
        """Files of the last finished result, see `plan.manifest.result_folder`."""
        found = self, self.at(self.output / LEAVING), self.at(self.previous)
        return next((each for each in found if each.record.is_file()), self)

    def holder(self, want: Wanted) -> RunFiles | None:
        """Return the files of the result that came from `want`: the present or a previous one."""
        before = () if self.is_forced(want) else self.before()
        return next((each for each in (self, *before) if each.came_from(want)), None)

    def is_forced(self, want: Wanted) -> bool:
        """Whether a forced training from `want` goes on, so that no previous result is wanted."""
        mark = Origin.read(self.forced)
        return mark is not None and mark.wanted == want

    def came_from(self, want: Wanted) -> bool:
        """Whether the result is there and came from `want`."""
        origin = Origin.read(self.record)
        fits = origin is not None and origin.wanted == want
        return fits and all(path.is_file() for path in self.results)

    def trained(self, want: Wanted) -> Record | None:
        """Return the record of the trained weights, if they are there and came from `want`."""
        return Record.read(self.record) if self.came_from(want) else None

    def outputs(self, word: str, *, finished: bool) -> dict[Path, str]:
        """Return files and their captions; see `Backend.outputs`."""
        surely = [*self.results, self.record, self.basis] if word == "train" else []
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
        there = [path for path in dict.fromkeys([*surely, *made]) if path.is_file() or not finished]
        return {path: captions.get(path, "") for path in there}

    def missing(self) -> list[Difference]:
        """Return a reason to train for each file that is missing after a training, or damaged.

        A training that has its weights writes no more than these files.
        """
        needed = (*self.results, self.receipt)
        found = [Difference(f"{path} is missing") for path in needed if not path.is_file()]
        Basis.read(self.basis)
        damaged = filter(is_damaged, (self.record, self.basis))
        return found + [Difference(f"{path} is damaged") for path in damaged]


def last_place(path: Path) -> Path:
    """Return where a file of a result lies: at its path, or moved to `previous` from there."""
    if path.exists():
        return path
    runs = (each for each in path.parents if (each / PREVIOUS / "training.json").is_file())
    moved = (each / PREVIOUS / path.relative_to(each) for each in runs)
    return next((each for each in moved if each.exists()), path)


class _Recorded(JsonFile):
    """A record beside trained weights, whose content the receipt of its build has as well."""

    @classmethod
    def read(cls, path: Path) -> Self | None:
        """Return a record; where it is damaged, that of the receipt, if it is of these weights."""

        def parse(data: bytes) -> list[Self]:
            try:
                return [cls.model_validate_json(data)]
            except ValidationError:
                for other in (Record, LaunchedRecord):  # a trainer of another kind may be set now
                    with suppress(ValidationError):
                        other.model_validate_json(data)
                        return []
                raise

        known: list[Self] | None = read_state(path, parse)
        if known is not None or not is_damaged(path):
            return known[0] if known else None
        values = read_state(path.with_name(_RECEIPT), _VALUES.validate_json) or {}
        try:
            found = cls(**{name: values[name] for name in cls.model_fields if name in values})
            files = found.model_dump()["files"].items()
            same = [digest.of_file(path.parent / name) == known for name, known in files]
        except (OSError, ValueError):
            return None
        return found if same and all(same) else None


class Record(_Recorded, extra="ignore"):  # earlier releases write more
    """Origin of trained weights, and their losses; kept beside them.

    Attributes:
        loss_start: mean squared error over fixed noise and timesteps, before the training.
        loss_end: the same afterwards.
        seconds: time spent on steps, without what a killed training lost.
        mixed_precision: that it trained in; "" in records of earlier releases.
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
    """What pages and checks read of a `Record` or `LaunchedRecord`."""

    steps: int | None = None
    loss_start: float | None = None
    loss_end: float | None = None
    seconds: Amount | None = None
    files: dict[str, str] = Field({})


def trained_files(run: str) -> tuple[Path, dict[str, str]]:
    """Return the path of a run's record, and its files: name below the run's folder -> digest."""
    path = run_folder(run) / "training.json"
    record = AnyRecord.read(path)
    return path, {} if record is None else record.files


def finish(order: RunOrder, record: Record | LaunchedRecord, receipt: Path, **more: object) -> None:
    """Write what trained weights came from, and the receipt: their record and `more`."""
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

    `write` fills a new folder; `names` are those of all files and folders that any training of this
    kind may write there: what is left of an incomplete result is replaced.
    """
    new = files.output / f".new{atomic.TEMPORARY_SUFFIX}"
    try:
        write(new)
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
    found = {}
    for place in (files.output / name for name in sorted(names)):
        for path in sorted(place.rglob("*")) if place.is_dir() else [place]:
            if path.is_file():
                name = path.relative_to(files.output).as_posix()
                found[name] = digest.of_file(path, quiet=True)
    record.model_copy(update={"files": found}).write(files.record)
