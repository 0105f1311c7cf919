"""Variant of a caption at a step: a function of the seed and the step alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import floor

import torch

from latentmake.data.captions import warming
from latentmake.training.loop.batch_order import BatchOrder, generator
from latentmake.training.loop.caches import Caches
from latentmake.training.loop.order import TextSchedule


@dataclass(frozen=True)
class Variants:
    """Batches in which variants of their captions take the place of examples.

    Attributes:
        caches: knows the variants.
        schedules: dataset -> how they depend on the step; without one, any may come at any time.
        order: of the batches.
        steps: of the training.
        seed: of the training.
    """

    caches: Caches
    schedules: dict[str, TextSchedule]
    order: BatchOrder
    steps: int
    seed: int

    def batches(self, process: int, first: int, last: int) -> Iterator[list[int]]:
        """Yield the batches of one process for some steps, as `BatchOrder.batches` does."""
        for number, batch in enumerate(self.order.batches(process, first, last)):
            step, part = divmod(number, self.order.accumulation)
            yield self._chosen(batch, first + step, process, part)

    def _chosen(self, batch: list[int], step: int, process: int, part: int) -> list[int]:
        """Return the examples that replace these in a part of a step (from 1)."""
        random = generator(self.seed, "variant", step, process, part)
        # One number for each example, whether it is used or not: no other example's depends on it.
        draws = torch.rand(len(batch), generator=random, dtype=torch.float64).tolist()
        return [self._one(index, draw, step) for index, draw in zip(batch, draws, strict=True)]

    def _one(self, index: int, draw: float, step: int) -> int:
        caches = self.caches
        schedule = self.schedules.get(caches.rows[index].dataset, TextSchedule())
        every = schedule.caption_dropout_every_n_epochs
        if every and index in caches.dropped:
            epoch = floor(self.order.epoch(step - 1)) + 1
            if epoch % every == 0:
                return caches.dropped[index]
        variants = caches.variants.get(index)
        if variants is None:
            return index
        until = schedule.token_warmup_step
        until = floor(until * self.steps) if until < 1 else until
        if schedule.token_warmup_step > 0:
            warm = warming(len(variants))
            if step - 1 < until:
                return variants[int((step - 1) / until * warm)]
            variants = variants[warm:]
        return variants[int(draw * len(variants))]
