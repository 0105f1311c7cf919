"""A trainer in a package of its own: its weights are the mean of the latents."""

import time
from pathlib import Path
from typing import ClassVar, Literal

from latentmake.base import digest
from latentmake.config.fields import Real
from latentmake.config.trainers import Trainer
from latentmake.runs.backend import Backend
from latentmake.runs.findings import Finding
from latentmake.runs.history import finish
from latentmake.runs.order import (
    Record,
    RunFiles,
    RunOrder,
    read_order,
    run_values,
    write_trained,
)
from latentmake.runs.rows import rows_of


class AverageTrainer(Trainer):
    """The mean of the latents."""

    layout: ClassVar[str] = "plain"
    network: ClassVar[str] = "vae"

    kind: Literal["average"]
    """The trainer: `average`."""
    factor: Real = 1.0
    """Factor of the mean."""


class AverageOrder(RunOrder):
    factor: float
    results: ClassVar[list[str]] = ["average.safetensors"]

    def settings(self):
        return {"factor": self.factor}

    def settings_digest(self):
        return digest.of_value(self.settings())

    def networks(self):
        return []


class Average(Backend):
    settings = AverageTrainer

    def plan(self, facts, plan, *, train):
        factor = facts.config.runs[plan.name].trainer.factor
        order = AverageOrder(kind="average", factor=factor, **run_values(plan.name))
        order, forced = order.force(facts.forced)
        plan.trainer, plan.trainer_order = order, order.path
        if not facts.read_only:
            self.write(order)
        outdated = [] if plan.lock else plan.outdated
        plan.reasons = [*forced, *outdated, *order.reasons(plan.lock)]

    def check(self, order, *, current):
        verdict = "ok" if order.factor else "warning"
        yield Finding("factor", verdict, f"the mean is multiplied by {order.factor}")

    def train(self, order, *, log, receipt, processes=1, threads=2):
        from safetensors.torch import load_file, save_file

        began, order = time.monotonic(), read_order(order, AverageOrder)
        rows = [row for row in rows_of(Path(order.manifest)) if row.learned]
        paths = [path for row in rows for size in row.latents for path in row.latents_at(size)]
        means = [load_file(path)["latents"].mean() for path in paths]

        def write(folder):
            folder.mkdir()
            weights = {"mean": order.factor * sum(means) / len(means)}
            save_file(weights, folder / "average.safetensors")

        product = order.product(order.wanted())
        record = Record.of(product, seconds=time.monotonic() - began)
        write_trained(write, record, RunFiles(order), order.results)
        finish(order, Record.read(RunFiles(order).record), receipt)
