"""Order of the examples: a function of the seed alone, so that a killed training can resume.

Every random choice of a training is drawn from (seed, purpose, epoch or step), never from a state
that would have to be carried from step to step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

import torch

from latentmake import digest


def seed_of(*parts: int | str) -> int:
    """Return a seed of 63 bits that is as good as independent for different parts."""
    return int(digest.of_value(parts)[:16], 16) >> 1


def generator(*parts: int | str) -> torch.Generator:
    """Return a random generator (on the CPU, the same on all machines) for these parts."""
    return torch.Generator().manual_seed(seed_of(*parts))


def epoch_batches(
    shapes: Sequence[tuple[int, ...]],
    repeats: Sequence[int],
    batch_size: int,
    seed: int,
    epoch: int,
) -> list[list[int]]:
    """Return the batches of one epoch, as indices: one shape a batch, shuffled.

    Args:
        shapes: latents' shape of each example.
        repeats: how often an epoch shows each example.
        batch_size: most examples of a batch; a shape's last batch may be shorter.
        seed: of the training.
        epoch: from 0.
    """
    random = generator(seed, "order", epoch)
    groups: dict[tuple[int, ...], list[int]] = {}
    for index, (shape, count) in enumerate(zip(shapes, repeats, strict=True)):
        groups.setdefault(shape, []).extend([index] * count)
    batches: list[list[int]] = []
    for _, members in sorted(groups.items()):
        order = torch.randperm(len(members), generator=random).tolist()
        shuffled = [members[place] for place in order]
        batches += [
            shuffled[start : start + batch_size] for start in range(0, len(shuffled), batch_size)
        ]
    return [batches[place] for place in torch.randperm(len(batches), generator=random).tolist()]


class BatchOrder:
    """Batches of each process at each optimizer step.

    Epochs follow one another without a gap: micro-batch n of the training is batch n of the endless
    row of epochs. A step takes `accumulation * processes` of them in turn, so all processes always
    have work, and no batch is shown twice or left out.
    """

    def __init__(
        self,
        shapes: Sequence[tuple[int, ...]],
        repeats: Sequence[int],
        *,
        batch_size: int,
        seed: int,
        accumulation: int = 1,
        processes: int = 1,
    ) -> None:
        self._epoch = lru_cache(maxsize=2)(
            lambda epoch: epoch_batches(shapes, repeats, batch_size, seed, epoch)
        )
        self.batches_per_epoch = len(self._epoch(0))
        self.accumulation = accumulation
        self.processes = processes

    def _batch(self, number: int) -> list[int]:
        epoch, place = divmod(number, self.batches_per_epoch)
        return self._epoch(epoch)[place]

    def epoch(self, step: int) -> float:
        """Return how many epochs have passed after `step` steps."""
        return step * self.accumulation * self.processes / self.batches_per_epoch

    def items(self, step: int) -> int:
        """Return how many examples all processes together see in step `step` (from 1)."""
        each = self.accumulation * self.processes
        return sum(len(self._batch(number)) for number in range((step - 1) * each, step * each))

    def batches(self, process: int, first: int, last: int) -> Iterator[list[int]]:
        """Yield the batches of one process for steps `first` to `last` (from 1, both included)."""
        for number in range((first - 1) * self.accumulation, last * self.accumulation):
            yield self._batch(number * self.processes + process)
