"""Files and records of a training by one of our trainers.

No torch here: launcher and planner compare the record to see whether there is anything to train.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from latentmake import digest
from latentmake.training.json_file import JsonFile
from latentmake.training.loop.order import TrainingOrder
from latentmake.training.order import Wanted, lock_digest

__all__ = [
    "CHECKPOINT_STATE",
    "CHECKPOINT_WEIGHTS",
    "COPIED",
    "LORA_WEIGHTS",
    "History",
    "Receipt",
    "Record",
    "RunFiles",
    "checkpoint_digest",
    "sample_steps",
    "wanted",
    "wanted_of",
]

LORA_WEIGHTS = "pytorch_lora_weights.safetensors"  # diffusers' own name
CHECKPOINT_WEIGHTS = "weights.safetensors"
CHECKPOINT_STATE = "state.pt"
COPIED = "wanted.json"
"""In a copy of the trained weights: the digests that they came from."""

_POINTS = 20


class RunFiles:
    """The files below a run's output folder.

    Attributes:
        weights: the trained weights; where there are several files, the first.
        record: a `Record`, written after them.
        samples: latents of the sample pictures, a file a step.
        grid: the sample pictures.
        checkpoints: a folder each.
        saved: copies of the trained weights along the way, a folder a step.
        save: a file by which a user asks for such a copy at once.
        scalars: TensorBoard's files.
    """

    def __init__(self, order: TrainingOrder) -> None:
        self.output = Path(order.output)
        self.weights = self.output / order.result
        self._results = [self.output / name for name in order.results]
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
        return record if fits and all(path.is_file() for path in self._results) else None


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
    """

    wanted: Wanted
    steps: int
    loss_start: float
    loss_end: float
    seconds: float
    history: list[tuple[int, float]]


class Receipt(JsonFile):
    """Result of a training, for the build."""

    run: str
    weights: str
    wanted: Wanted
    steps: int
    loss_start: float
    loss_end: float
    seconds: float
    samples: str | None


def wanted(order: TrainingOrder) -> Wanted:
    """Return the digests that the trained weights of this order must have come from.

    Raises:
        TrainingError: the lock is missing or damaged.
        ModelError: files of the network are missing.
    """
    weights = order.weights or order.network_digest()
    checkpoint = order.trainer.resume_from_checkpoint
    if checkpoint is not None and not order.resumed:
        order = order.model_copy(update={"resumed": checkpoint_digest(Path(checkpoint))})
    return wanted_of(order, data=lock_digest(order.lock), weights=weights)


def checkpoint_digest(folder: Path, file_digest: Callable[[Path], str] = digest.of_file) -> str:
    """Return the digest of a checkpoint's content; "" where it is not there."""
    try:
        files = (CHECKPOINT_WEIGHTS, CHECKPOINT_STATE)
        return digest.of_value([file_digest(folder / name) for name in files])
    except OSError:
        return ""


def wanted_of(order: TrainingOrder, *, data: str, weights: str) -> Wanted:
    """Return the same where the digests of data and network are known."""
    return Wanted(
        data=data,
        settings=order.settings_digest(),
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
