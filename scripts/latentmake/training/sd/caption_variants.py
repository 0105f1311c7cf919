"""Which variant of an item's text a step sees: a function of the seed and the step alone."""

from __future__ import annotations

from collections.abc import Iterator
from math import floor

import torch

from latentmake.sources.caption_pipeline import warming
from latentmake.training.order import TextSchedule
from latentmake.training.sd.batch_order import Schedule, generator
from latentmake.training.sd.data.caches import Caches

__all__ = ["Variants"]


class Variants:
    """Puts examples with other variants of their texts in the place of those of a batch.

    Args:
        caches: knows the variants.
        schedules: dataset -> how they depend on the step; none: any may come at any time.
        schedule: tells the epoch of a step.
        steps: of the whole training.
        seed: of the training.
    """

    def __init__(
        self,
        caches: Caches,
        schedules: dict[str, TextSchedule],
        schedule: Schedule,
        *,
        steps: int,
        seed: int,
    ) -> None:
        self._caches = caches
        self._schedules = schedules
        self._schedule = schedule
        self._steps = steps
        self._seed = seed

    def batches(self, process: int, first: int, last: int) -> Iterator[list[int]]:
        """Yield the batches of one process for some steps, as `Schedule.batches` does."""
        batches = self._schedule.batches(process, first, last)
        if not self._caches.variants and not self._caches.dropped:
            yield from batches
            return
        for number, batch in enumerate(batches):
            step = first + number // self._schedule.accumulation
            yield self.choose(batch, step, process, number % self._schedule.accumulation)

    def choose(self, batch: list[int], step: int, process: int = 0, part: int = 0) -> list[int]:
        """Return the examples that a step sees in the place of these.

        Args:
            batch: indices of examples.
            step: from 1.
            process: of several that train together.
            part: which of the step's batches this is.
        """
        random = generator(self._seed, "variant", step, process, part)
        # One number for each example, whatever is done with it: no neighbour changes another's.
        draws = torch.rand(len(batch), generator=random, dtype=torch.float64).tolist()
        return [self._one(index, draw, step) for index, draw in zip(batch, draws, strict=True)]

    def _one(self, index: int, draw: float, step: int) -> int:
        caches = self._caches
        asked = self._schedules.get(caches.datasets[index], TextSchedule())
        every = asked.caption_dropout_every_n_epochs
        if every and index in caches.dropped:
            epoch = floor(self._schedule.epoch(step - 1)) + 1
            if epoch % every == 0:
                return caches.dropped[index]
        several = caches.variants.get(index)
        if several is None:
            return index
        until = asked.token_warmup_step
        until = floor(until * self._steps) if until < 1 else until
        if asked.token_warmup_step <= 0:
            return several[int(draw * len(several))]
        warm = warming(len(several))
        if step - 1 < until:
            return several[int((step - 1) / until * warm)]
        rest = several[warm:]
        return rest[int(draw * len(rest))]
