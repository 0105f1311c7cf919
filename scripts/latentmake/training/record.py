"""Files and records of a training, by one of our trainers or by a launched program.

No torch here: launcher and planner compare the record to see whether there is anything to train.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from pydantic_core import to_json

from latentmake import digest
from latentmake.errors import storage_error
from latentmake.files import atomic
from latentmake.plan.reasons import Difference
from latentmake.training.order import BASIS, JsonFile, RunOrder, Wanted

COPIED = "wanted.json"
"""In a copy of the trained weights: the digests that they came from."""

_POINTS = 20


class RunFiles:
    """The files below a run's output folder.

    Attributes:
        results: files of the trained weights, under these names only once they are complete.
        weights: the first of them.
        record: a `Record` or `LaunchedRecord`, written after them.
        receipt: of the build, written last.
        logs: TensorBoard's files.
        samples: the sample pictures and their index.
        grid: all of them as one.
        checkpoints: a folder each.
        saved: copies of the trained weights along the way, a folder a step.
        save: a file by which a user asks for such a copy at once.
        work: a launched trainer's own output folder: weights and states of epochs, last weights.
        last: its last weights.
        progress: what the states in `work` belong to.
        earlier: results of an earlier training, until there are new ones.
        resumed: the states that a training was resumed from.
    """

    def __init__(self, order: RunOrder) -> None:
        self.run, self.output = order.run, Path(order.output)
        self.results = [self.output / name for name in order.results]
        self.weights = self.results[0]
        self.record = self.output / "training.json"
        self.receipt = self.output / "trained.json"
        self.logs = self.output / "logs"
        self.samples = self.output / "samples"
        self.grid = self.output / "samples.png"
        self.checkpoints = self.output / "checkpoints"
        self.saved = self.output / "saved"
        self.save = self.output / "save"
        self.work = self.output / "output"
        self.last = self.work / self.weights.name
        self.progress = self.work / "wanted.json"
        self.earlier = self.work / "previous"
        self.resumed = self.work / "resumed"

    def trained(self, want: Wanted) -> Record | None:
        """Return the record of the trained weights, if they are there and came from `want`."""
        record = Record.read(self.record)
        fits = record is not None and record.wanted == want
        return record if fits and all(path.is_file() for path in self.results) else None

    def missing(self) -> list[Difference]:
        """Return a reason to train for each file that is missing after a training."""
        needed = (*self.results, self.receipt)
        return [Difference(f"{path} is missing") for path in needed if not path.is_file()]


class History(BaseModel):
    """The mean training loss of some twenty equal stretches of a training.

    Attributes:
        points: (last step of a stretch, its mean loss).
        total: sum of the losses of the stretch that has not ended.
        count: number of these losses.
    """

    model_config = ConfigDict(extra="forbid")
    points: list[tuple[int, float]] = []
    total: float = 0.0
    count: int = 0

    def add(self, step: int, loss: float, steps: int) -> None:
        """Add the loss of a step, of `steps` in all."""
        self.total += loss
        self.count += 1
        if step % max(1, steps // _POINTS) == 0 or step == steps:
            self.points.append((step, self.total / self.count))
            self.total, self.count = 0.0, 0


class Record(JsonFile):
    """Origin of trained weights, and their losses; kept beside them.

    Attributes:
        loss_start: mean squared error over fixed noise and timesteps, before the training.
        loss_end: the same afterwards.
        seconds: time spent on steps, without what a killed training lost.
        continued: steps at which this training took over the state of a shorter one.
        mixed_precision: that it trained in; "" in records of earlier releases.
        files: path of each file of trained weights below the run's folder -> its SHA-256; empty in
            records of earlier releases.
    """

    wanted: Wanted
    steps: int
    loss_start: float
    loss_end: float
    seconds: float
    history: list[tuple[int, float]]
    continued: list[int] = Field([])
    mixed_precision: str = ""
    files: dict[str, str] = Field({})


class LaunchedRecord(JsonFile):
    """Origin of weights that a launched trainer wrote, with their path; see `Record`."""

    wanted: Wanted
    weights: str
    seconds: float
    files: dict[str, str] = Field({})


def finish(order: RunOrder, record: Record | LaunchedRecord, receipt: Path, **more: object) -> None:
    """Write what trained weights came from, and the receipt: their record and `more`."""
    files = RunFiles(order)
    order.basis(record.wanted).write(files.output / BASIS)
    content: dict[str, Any] = {"run": order.run, "weights": str(files.weights)}
    atomic.write(receipt, to_json(content | record.model_dump() | more, indent=2) + b"\n")


def write_trained(write: Callable[[Path], object], names: Iterable[str], files: RunFiles) -> None:
    """Write the trained weights; an older result stays until the new one is complete.

    Its record goes first, so that it never stands beside weights of another training.

    Args:
        write: writes the weights into a new folder.
        names: of all files and folders that any training of this kind may write there.
        files: of the run.
    """
    new, old = (files.output / f".{name}{atomic.TEMPORARY_SUFFIX}" for name in ("new", "old"))
    try:
        write(new)
        shutil.rmtree(old, ignore_errors=True)
        old.mkdir()
        files.record.unlink(missing_ok=True)
        for name in names:
            if (files.output / name).exists():
                (files.output / name).rename(old / name)
            if (new / name).exists():
                (new / name).rename(files.output / name)
        shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        raise storage_error(error, files.output) or error from None
    finally:
        shutil.rmtree(new, ignore_errors=True)


def write_record(record: Record, files: RunFiles, names: Iterable[str]) -> None:
    """Write the record of trained weights, with the digests of their files as they are now.

    Args:
        record: of the training; its `files` are replaced.
        files: of the run.
        names: of all files and folders that may hold weights; those that are missing are left out.
    """
    found = {}
    for place in (files.output / name for name in sorted(names)):
        for path in sorted(place.rglob("*")) if place.is_dir() else [place]:
            if path.is_file():
                name = path.relative_to(files.output).as_posix()
                found[name] = digest.of_file(path, quiet=True)
    record.model_copy(update={"files": found}).write(files.record)
