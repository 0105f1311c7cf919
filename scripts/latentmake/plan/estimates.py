"""Estimates from past jobs of the same kind and model: time, bytes, batches, limits on a cluster.

The bytes of latents follow from their shape where the VAE's configuration tells it.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import NamedTuple, TypeVar

from latentmake.config.machines import Cluster, TrainingJob
from latentmake.errors import ModelError
from latentmake.files.disk import Need, human
from latentmake.geometry.buckets import Size
from latentmake.index.memo import Memo
from latentmake.models.shapes import latents_shape
from latentmake.plan.orders import Order

Resources = dict[str, int | str | Callable[[object, int], int]]
_Group = TypeVar("_Group", bound=Hashable)
_UNKNOWN_SECONDS, _UNKNOWN_ITEMS = 2.0, 1024  # of an item, and in a batch, without past jobs


class Past(NamedTuple):
    """Sums over past jobs of one kind and model; each job counts twice as much as the one before.

    Attributes:
        targets: cache files that were encoded, or linked to an equal one.
        seconds: from the first encoded item to the end.
        size: bytes of the files, of several names of one file once.
        starting: seconds from the start of the last job to its first encoded item.
        words: on the bottleneck of the last job that was not short.
    """

    targets: float = 0.0
    seconds: float = 0.0
    size: float = 0.0
    starting: float = 0.0
    words: str = ""

    def time(self, targets: float) -> float:
        """Return the seconds that some targets take in a job that has started."""
        return targets * self.seconds / (self.targets or 1)


def past_jobs(memo: Memo, work: str) -> Past | None:
    """Return what past jobs of a kind and model tell; None where none has run here."""
    try:
        return Past(**json.loads(memo.rates.get(work) or "[]"))
    except (TypeError, ValueError):  # none, or in the form of a former version
        return None


def learn_job(memo: Memo, work: str, job: Past) -> None:
    """Remember a job of a kind and model; one without targets counts for nothing."""
    if job.targets > 0 and job.seconds > 0:
        old = past_jobs(memo, work) or Past()
        new = Past(
            old.targets / 2 + job.targets,
            old.seconds / 2 + job.seconds,
            old.size / 2 + job.size,
            job.starting or old.starting,
            job.words or old.words,
        )
        memo.rates.learn(work, None, json.dumps(new._asdict()))


def batch_items(memo: Memo, work: str, minutes: float, targets: float) -> int:
    """Return how many items of some targets each past jobs of a kind and model encoded in minutes.

    Starting a job shall be a tenth of it at most, however short the time asked for.
    """
    past = past_jobs(memo, work)
    if past is None:
        return _UNKNOWN_ITEMS
    seconds = max(minutes * 60 - past.starting, 9 * past.starting)
    return max(1, int(seconds / past.time(targets)))


class Estimate(NamedTuple):
    """Cache files to be encoded: number, bytes, seconds in a job that has started; unknown is 0."""

    number: int = 0
    size: float = 0.0
    seconds: float = 0.0


def estimates(
    memo: Memo, orders: Iterable[Order], group: Callable[[Order, str], _Group]
) -> dict[_Group, Estimate]:
    """Return the estimates of some orders' targets, in groups by order and part."""
    found: dict[_Group, Estimate] = {}
    for order in orders:
        past = past_jobs(memo, order.work) or Past()
        targets = () if order.reuses else (each for item in order.items for each in item.targets)
        alike = Counter((x.part, x.size, x.clip.frames if x.clip else 1) for x in targets)
        for (part, pixels, frames), number in alike.items():
            size = _latents_bytes(order, pixels, frames) or past.size / (past.targets or 1)
            old = found.get(name := group(order, part), Estimate())
            size, seconds = old.size + number * size, old.seconds + past.time(number)
            found[name] = Estimate(old.number + number, size, seconds)
    return found


def lines(memo: Memo, orders: Iterable[Order]) -> Iterator[str]:
    """Yield a line for each kind and model of which anything is known."""
    for work, (_, size, seconds) in estimates(memo, orders, lambda x, _: x.work).items():
        from latentmake.progress import duration

        past = past_jobs(memo, work)
        words = [duration((past.starting + seconds) / 60)] if past else []
        words += [human(size)] if size else []
        if words:
            yield f"{work.replace(' ', ' of ')}: about {', '.join(words)}"


def needs(memo: Memo, orders: Iterable[Order]) -> list[Need]:
    """Return the room that some orders need, as far as it is known."""
    found = estimates(memo, orders, lambda order, _: f"{order.kind} of {order.model}")
    return [Need(what, "cache", round(each.size)) for what, each in found.items()]


def _latents_bytes(order: Order, pixels: Size | None, frames: int) -> int:
    """Return the bytes of a file of latents; 0 of text, of another program's, where unknown."""
    model, settings = order.model_settings, order.dataset_settings
    if order.kind == "text" or order.is_external or pixels is None:
        return 0
    if model.spec.video:  # Wan's latents, those of a control, and of the first frame with its mask
        number = 16 * (1 + (settings.control_directory is not None)) + 20 * model.image_to_video
        number, side = number * ((frames - 1) // 4 + 1), 8
    else:
        try:
            shape = latents_shape(model.vae)
        except ModelError:  # which the job names
            return 0
        if shape is None:
            return 0
        number, side = shape.channels * (1 + settings.flip_aug), shape.factor
    dtype = model.vae_dtype or model.dtype
    wide = dtype == "float32" or (order.layout.npz and dtype == "bfloat16")  # as numpy lacks it
    return number * (pixels.width // side) * (pixels.height // side) * (4 if wide else 2)


class TrainingEstimate(NamedTuple):
    """Memory, disk and time of a training.

    Attributes:
        memory: parts of what one device must hold -> bytes, the largest first in importance.
        disk: bytes of its results, and of the checkpoints that are kept, in `folder`.
        steps: of the optimizer; None where the number of items decides.
        seconds: a step, in the run's last training; None where there was none.
    """

    run: str
    memory: dict[str, int]
    disk: int
    folder: str
    steps: int | None = None
    seconds: float | None = None

    @property
    def need(self) -> Need:
        """Room for results and checkpoints."""
        return Need(f"results and checkpoints of {self.run}", self.folder, self.disk)

    @property
    def note(self) -> str:
        """The estimate in words: memory, disk, and time where it is known."""
        from latentmake.progress import duration

        parts = ", ".join(f"{name} {human(size)}" for name, size in self.memory.items())
        memory = f"about {human(sum(self.memory.values()))} of GPU memory ({parts})"
        words = [f"{memory}, {human(self.disk)} of disk"]
        if self.seconds is not None:
            time = f"{duration(self.steps * self.seconds / 60)} at " if self.steps else ""
            words.append(f"{time}{self.seconds:.2g} s a step, as in the last training")
        return "; ".join(words)


def resources_of(
    cluster: Cluster, kind: str, orders: Sequence[Order], memo: Memo | None
) -> Resources:
    """Return the cluster resources of a job of a kind (`encode`, `train`) with some orders.

    `memo` knows past jobs; None in a process that does not plan.
    """
    asked = cluster.encode if kind == "encode" else cluster.train
    past = past_jobs(memo, orders[0].work) if memo is not None and orders else None
    seconds = _UNKNOWN_SECONDS * max(1, sum(len(order.items) for order in orders))
    if past is not None:
        seconds = past.starting + past.time(sum(len(order.paths) for order in orders))
    limit = asked.runtime + (2 * seconds / 60 if kind == "encode" else 0)
    found: Resources = {
        "mem_mb": lambda wildcards, attempt: int(asked.mem_mb * (1 + (attempt - 1) / 2)),
        "runtime": lambda wildcards, attempt: math.ceil(limit * attempt),
    }
    if isinstance(asked, TrainingJob) and asked.nodes > 1:
        found["nodes"] = asked.nodes
    slurm = {"partition": asked.partition or cluster.partition, "account": cluster.account}
    return found | {f"slurm_{name}": value for name, value in slurm.items() if value}
