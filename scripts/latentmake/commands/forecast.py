"""Times of a run's encoding and training, from earlier jobs and records, or from a trial."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from latentmake import backends
from latentmake.base.machine import counted
from latentmake.encode import gpu
from latentmake.layouts.layout import kind_of
from latentmake.pages.plan_report import by_work, to_make
from latentmake.plan.estimates import past_jobs
from latentmake.plan.facts import Facts
from latentmake.plan.product import text_of
from latentmake.plan.run_plan import RunPlan
from latentmake.runs.history import all_trainings
from latentmake.runs.order import Record, RunOrder, taken_back

_ERRORS = 2  # standard errors on each side of the mean, for the range
# Settings that change neither the time of a step nor its memory.
_PACELESS = {
    *("steps", "epochs", "max_steps", "max_train_steps", "max_train_epochs", "learning_rate"),
    *("lr_scheduler", "lr_warmup_steps", "lr_min_ratio", "seed", "weight_decay", "max_grad_norm"),
    *("snr_gamma", "noise_offset", "flow_shift", "network_alpha", "optimizer_arguments"),
}


class Times(NamedTuple):
    """Expected time, with the range that a trial gives; the range is a point for other sources.

    In the result of a trial, it is the time of a unit: a pixel, a text, or a step of a training.

    Attributes:
        basis: source of the time, in words.
        starting: seconds before the first unit.
    """

    seconds: float
    low: float
    high: float
    basis: str
    starting: float = 0.0

    @classmethod
    def mean(
        cls, paces: Sequence[float], amounts: Sequence[float], basis: str, starting: float = 0.0
    ) -> Times:
        """Return the mean of measured times of a unit; the range is two standard errors wide.

        Args:
            paces: seconds of a unit, as measured several times.
            amounts: units of each measurement.
            basis: source of the time, in words.
            starting: seconds before the first unit.
        """
        total = sum(pace * amount for pace, amount in zip(paces, amounts, strict=True))
        mean, error = total / sum(amounts), 0.0
        if len(paces) > 1:
            error = _ERRORS * statistics.stdev(paces) / math.sqrt(len(paces))
        return cls(mean, max(mean - error, 0.0), mean + error, basis, starting)

    def of(self, units: float) -> Times:
        """Return the time of so many units."""
        several = (self.seconds, self.low, self.high)
        seconds, low, high = (self.starting + units * value for value in several)
        return Times(seconds, low, high, self.basis)


def encoding_times(
    facts: Facts, plan: RunPlan, trials: Mapping[str, Times]
) -> dict[str, Times | None]:
    """Return kind and model -> time of the encoding; None if it is unknown."""
    parts = {part.work: part for part in plan.parts}
    times: dict[str, Times | None] = {}
    for work, rest in by_work(facts, to_make(plan.parts)).items():
        part, past = parts[work], past_jobs(facts.memo, work)
        dtype = facts.recipe_of(part).get("dtype", "")
        device = f"{gpu.device()} {dtype}".rstrip()
        times[work] = None
        if work in trials:
            times[work] = trials[work].of(rest.pixels or rest.targets)
        elif past is not None and past.device == device:
            seconds = past.starting + rest.seconds
            basis = f"{counted(round(past.jobs), 'job')} on {device}"
            times[work] = Times(seconds, seconds, seconds, basis)
    return times


def training_time(facts: Facts, plan: RunPlan, trials: Mapping[str, Times]) -> Times | None:
    """Return the time of a run's training; None if it is unknown or the run is trained already."""
    order = plan.trainer
    if plan.training_order is None or not isinstance(order, RunOrder):
        return None
    if plan.note == taken_back(plan.name):
        return Times(0.0, 0.0, 0.0, "its previous result")
    steps = steps_of(facts, plan, order)
    if (trial := trials.get(f"training {plan.name}")) and steps:
        return trial.of(steps)
    records = [*_records(facts, plan, order)]
    basis = f"{counted(len(records), 'training')} on {gpu.device()}"
    if paces := [record.seconds / record.steps for record in records if record.steps and steps]:
        mean = sum(paces) / len(paces)
        return Times(steps * mean, steps * min(paces), steps * max(paces), basis)
    # A launched trainer does not report its steps: the length must be the same.
    same = [record.seconds for record in records if not _differs(order, record, set())]
    return Times(sum(same) / len(same), min(same), max(same), basis) if same else None


def steps_of(facts: Facts, plan: RunPlan, order: RunOrder) -> int:
    """Return about how many steps a training of Latentmake itself has left; 0 for another trainer.

    A batch has items of one shape, so an epoch may have a few steps more.
    """
    trainer: Any = facts.config.runs[plan.name].trainer
    if trainer is None or not trainer.ours or not hasattr(order, "length"):
        return 0
    steps = int(order.length)
    if trainer.epochs is not None:
        batch = trainer.train_batch_size * trainer.gradient_accumulation_steps
        steps = math.ceil(trainer.epochs * math.ceil(_examples(facts, plan) / batch))
    backend = backends.of_run(facts.config, plan.name)
    done = backend.steps_done(order, plan.lock) if backend and plan.lock else 0
    return max(1, min(steps, trainer.step_limit or steps) - done)


def _examples(facts: Facts, plan: RunPlan) -> int:
    """Return the number of examples in an epoch."""
    datasets = facts.config.datasets
    return sum(
        datasets[part.dataset].num_repeats * (state.fresh + len(state.to_make))
        for part, state in plan.parts.items()
        if kind_of(part.name) == "latents"
    )


def _records(facts: Facts, plan: RunPlan, order: RunOrder) -> Iterator[Record]:
    """Yield the records of trainings whose steps take as long as those of an order.

    Network, device, precision, resolutions and all settings that change the pace are the same.
    """
    network = order.wanted("")["network"]
    precision = getattr(facts.config.runs[plan.name].trainer, "mixed_precision", "")
    sizes = {part.name for part in plan.parts if kind_of(part.name) == "latents"}
    for record in (training.record for training in all_trainings()):
        caches = [key for key in record.values.get("dataset", {}) if key.startswith("caches")]
        names = {key.rpartition("/")[2] for key in caches}
        same = {part for part in names if kind_of(part) == "latents"} == sizes
        exact = precision in ("", "auto") or record.mixed_precision in ("", precision)
        paced = not _differs(order, record, _PACELESS)
        done = record.parts.get("network") == network and record.seconds and not record.ended
        if done and same and exact and paced and record.device == gpu.device():
            yield record


def _differs(order: RunOrder, record: Record, without: set[str]) -> bool:
    """Whether a setting that a record has too differs, apart from those in `without`."""
    then = record.values.get("settings", {})
    return any(
        then[name] != text_of(value)
        for name, value in order.settings().items()
        if name in then and name not in without
    )
