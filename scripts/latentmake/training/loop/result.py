"""Files and records of a training by one of our trainers.

No torch here: launcher and planner compare the record to see whether there is anything to train.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from latentmake import digest
from latentmake.errors import storage_error
from latentmake.files import atomic
from latentmake.training.json_file import JsonFile
from latentmake.training.loop.order import TrainingOrder
from latentmake.training.order import Wanted, lock_digest

LORA_WEIGHTS = "pytorch_lora_weights.safetensors"  # diffusers' own name
CHECKPOINT_WEIGHTS = "weights.safetensors"
CHECKPOINT_STATE = "state.pt"
COPIED = "wanted.json"
"""In a copy of the trained weights: the digests that they came from."""

_POINTS = 20
_GONE = ({"attention": "flash"}, {"attention": "xformers"})


class RunFiles:
    """The files below a run's output folder.

    Attributes:
        results: files of the trained weights.
        weights: the first of them.
        record: a `Record`, written after them.
        samples: the sample pictures and their index.
        grid: all of them as one.
        checkpoints: a folder each.
        saved: copies of the trained weights along the way, a folder a step.
        save: a file by which a user asks for such a copy at once.
        scalars: TensorBoard's files.
    """

    def __init__(self, order: TrainingOrder) -> None:
        self.output = Path(order.output)
        self.results = [self.output / name for name in order.results]
        self.weights = self.results[0]
        self.record = self.output / "training.json"
        self.samples = self.output / "samples"
        self.grid = self.output / "samples.png"
        self.checkpoints = self.output / "checkpoints"
        self.saved = self.output / "saved"
        self.save = self.output / "save"
        self.scalars = self.output / "logs"

    def trained(self, want: Wanted) -> Record | None:
        """Return the record of the trained weights, if they are there and came from `want`."""
        record = Record.read(self.record)
        fits = record is not None and record.wanted == want
        return record if fits and all(path.is_file() for path in self.results) else None


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


def wanted(order: TrainingOrder) -> Wanted:
    """Return the digests that the trained weights of this order must have come from.

    Raises:
        TrainingError: the lock is missing or damaged.
    """
    checkpoint = order.trainer.resume_from_checkpoint
    if checkpoint is not None and not order.resumed:
        order = order.model_copy(update={"resumed": checkpoint_digest(Path(checkpoint))})
    return wanted_of(order, data=lock_digest(order.lock), weights=order.weights)


def checkpoint_digest(folder: Path, file_digest: Callable[[Path], str] = digest.of_file) -> str:
    """Return the digest of a checkpoint's content; "" where it is not there."""
    try:
        files = (CHECKPOINT_WEIGHTS, CHECKPOINT_STATE)
        return digest.of_value([file_digest(folder / name) for name in files])
    except OSError:
        return ""


def wanted_of(order: TrainingOrder, *, data: str, weights: str) -> Wanted:
    """Return the same where the digests of data and network are known.

    Weights that were trained with a key that is gone stay trained.
    """
    settings, record = order.settings_digest(), Record.read(RunFiles(order).record)
    trained = settings if record is None else record.wanted.settings
    if trained != settings and trained in [order.settings_digest(**gone) for gone in _GONE]:
        settings = trained
    return Wanted(
        data=data,
        settings=settings,
        weights=weights,
        resumed=order.resumed,
        version=order.version,
    )


def sample_steps(order: TrainingOrder, steps: int) -> frozenset[int]:
    """Return the steps after which a training draws sample pictures: first, last, in between."""
    every = order.trainer.samples.every
    if not order.prompts:
        return frozenset()
    if every is None:
        return frozenset(steps * quarter // 4 for quarter in range(5))
    return frozenset([*range(0, steps, every), steps])
