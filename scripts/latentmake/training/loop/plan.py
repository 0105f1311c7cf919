"""Plan of a run of one of our trainers: whether it is trained, and parts of its order."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from latentmake.config.trainers import LoopTrainer
from latentmake.plan.facts import Facts
from latentmake.plan.orders import prompt_path
from latentmake.plan.run_plan import RunPlan
from latentmake.plan.state import Difference
from latentmake.training.backend import Backend
from latentmake.training.loop.checkpoint import as_begun, resumable
from latentmake.training.loop.order import Prompt, TrainingOrder, goes_on, wanted
from latentmake.training.order import Record, RunFiles, run_values, taken_back

if TYPE_CHECKING:
    from latentmake.training.findings import Finding


class LoopBackend(Backend):
    """A trainer that trains by the loop; its networks draw clips or pictures, and are evaluated.

    Checklists, and what follows a training, are imported when they are asked for: most plans have
    nothing of them.

    Attributes:
        order_type: class of its orders.
        memory_hint: repair where a device has too little memory.
    """

    order_type: type[TrainingOrder]
    memory_hint: ClassVar[str]

    @abstractmethod
    def order(self, facts: Facts, run: str) -> TrainingOrder:
        """Return the order of a run; raises UserError where settings and networks do not fit."""

    @abstractmethod
    def recipe(self, order: Any) -> Any:
        """Return the `Recipe` of an order."""

    def plan(self, facts: Facts, plan: RunPlan, *, train: bool) -> None:
        """Write the order of a run, and decide whether it is to be trained."""
        order, forced = self.order(facts, plan.name).force(facts.forced)
        if plan.lock:
            order = as_begun(order, wanted(order, plan.lock))
        plan.trainer, plan.trainer_order = order, order.path
        if not facts.asks:
            order.write()
        plan.reasons = [*forced, *reasons(order, plan)]
        if plan.reasons:
            plan.note = _note(order, plan)
            if train:
                from latentmake.training.findings import check_settings, refuse_failed

                here, local = facts.runs_jobs, facts.local
                refuse_failed(check_settings(order.trainer, here=here, local=local))

    def check(self, order: Any, *, current: bool) -> Iterable[Finding]:
        """Check what the trainer's settings need."""
        from latentmake.training.findings import check_settings, gpu_findings

        return [*check_settings(order.trainer), *gpu_findings()]

    def train(self, order: Path, **options: Any) -> None:
        """Bring the trained weights of an order up to date; see `Backend.train`."""
        from latentmake.training.loop.launch import train

        train(self.order_type, order, **options)

    @abstractmethod
    def clip_settings(self, facts: Facts, training: Any, word: str) -> tuple[str, dict[str, Any]]:
        """Return the digest of all networks that draw, and settings that not all trainers have.

        They are settings of clips (`generate`), or of those of an evaluation (`evaluate`).

        Raises:
            UserError: the model draws no clips, or a file is missing.
        """

    def plan_following(
        self, facts: Facts, plan: RunPlan, word: str
    ) -> tuple[Path, list[Difference]]:
        """Write the order of clips or of an evaluation; see `Backend.plan_following`."""
        from latentmake.training.loop.clips import (
            EvaluationOrder,
            clip_reasons,
            following,
            result_reasons,
        )

        training, file_digest = plan.trainer, facts.memo.digest_of_file
        assert isinstance(training, TrainingOrder)
        order = following(facts, training, word, *self.clip_settings(facts, training, word))
        if not facts.asks:
            order.write(order.path)
        if waits := plan.awaited(order.texts()):
            return order.path, waits
        if isinstance(order, EvaluationOrder):
            return order.path, result_reasons(order, training, file_digest)
        return order.path, clip_reasons(order, file_digest)

    def follow(self, order: Path, word: str, *, log: Path, threads: int = 2) -> Path:
        """Bring clips or the results of an evaluation up to date; return their folder."""
        from latentmake.training.loop.launch import follow

        return follow(order, word, log=log, threads=threads)


def reasons(order: TrainingOrder, plan: RunPlan) -> list[Difference]:
    """Return why weights are not those of an order."""
    files = RunFiles(order)
    last = files.finished
    record = Record.read(last.record)
    if record is None:
        return [Difference("it has not been trained yet")]
    found = [] if plan.lock else [*plan.outdated]
    data = plan.lock or record.wanted.data
    want = wanted(order, data)
    is_other = record.wanted != want
    if is_other:
        if order.trainer.mixed_precision == "auto":  # the precision that it chose is no reason
            order = order.with_settings(mixed_precision=record.mixed_precision or "auto")
        today = wanted(order, data)
        basis = order.basis(today)
        found += basis.differences(last.output, record.wanted, order.chosen())
    if found:
        return found
    return files.missing() or [Difference("the settings changed")] * is_other


def _note(order: TrainingOrder, plan: RunPlan) -> str:
    """Return a line for the plan; "" of a training that begins anew, or has ended."""
    found, begins, want = None, order.trainer.init_lora, None
    if plan.lock and order.weights and not order.forced:
        want = wanted(order, plan.lock)
        if holder := RunFiles(order).holder(want):
            return "" if holder.output == Path(order.output) else taken_back(plan.name)
        found = next((f"step {each.progress.step}" for each in resumable(order, want)), None)
    if found is None and goes_on(order, want):
        found = "the last weights"
    if found is not None:
        return f"training of {plan.name}: goes on from {found}"
    return f"training of {plan.name}: begins from the LoRA {begins}" if begins else ""


def order_values(facts: Facts, name: str, trainer: LoopTrainer) -> dict[str, Any]:
    """Return the values of a run's order that all our trainers have."""
    run, samples = facts.config.runs[name], trainer.samples
    size = samples.resolution or run.resolutions[0]
    text = partial(prompt_path, facts.config, run.model)
    guided = trainer.draws and samples.guidance_scale > 1
    return {
        **run_values(name),
        "model": facts.config.models[run.model],
        "prompts": [Prompt(prompt=each, text=text(each)) for each in samples.prompts],
        "negative": text(samples.negative_prompt) if guided else None,
        "sample_size": (size.width, size.height),
        "trainer": trainer,
        "validates": run.validation and run.validation.every,
    }
