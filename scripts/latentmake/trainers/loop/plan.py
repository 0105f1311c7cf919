"""Plan of a run that is trained by the training loop: reasons to train, parts of its order."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from latentmake.config.trainers import LoopTrainer
from latentmake.plan.facts import Facts
from latentmake.plan.orders import prompt_path
from latentmake.plan.product import Difference, Parts
from latentmake.plan.run_plan import RunPlan
from latentmake.runs.backend import Backend
from latentmake.runs.order import Record, RunFiles, run_values, taken_back
from latentmake.trainers.loop.checkpoint import as_begun, resumable
from latentmake.trainers.loop.order import Prompt, TrainingOrder, goes_on

if TYPE_CHECKING:
    from latentmake.runs.findings import Finding


class LoopBackend(Backend):
    """A trainer that uses the training loop; its networks draw clips or pictures.

    Checklists, clips and evaluations are imported when they are needed, because most plans do not
    need them.

    Attributes:
        order_type: class of the trainer's orders.
        memory_hint: hint for a device that has too little memory.
    """

    order_type: type[TrainingOrder]
    memory_hint: ClassVar[str]

    @abstractmethod
    def order(self, facts: Facts, run: str) -> TrainingOrder:
        """Return the order of a run; raises UserError if settings and networks do not fit."""

    @abstractmethod
    def recipe(self, order: Any) -> Any:
        """Return the `Recipe` of an order."""

    def plan(self, facts: Facts, plan: RunPlan, *, train: bool) -> None:
        """Write the order of a run, and decide whether it is to be trained."""
        order, forced = self.order(facts, plan.name).force(facts.forced)
        if plan.lock:
            order = as_begun(order, plan.lock)
        plan.trainer, plan.trainer_order = order, order.path
        if not facts.read_only:
            self.write(order)
        trained = Record.read(RunFiles(order).finished.record)
        outdated = plan.outdated if trained and not plan.lock else []
        plan.reasons = [*forced, *outdated, *order.reasons(plan.lock)]
        if plan.reasons:
            plan.note = _note(order, plan)
            if train:
                from latentmake.runs.findings import check_settings, refuse_failed

                here, local = facts.runs_jobs, facts.local
                refuse_failed(check_settings(order.trainer, here=here, local=local))

    def trial(self, order: Any, folder: Path, steps: int) -> TrainingOrder:
        """Return the order of a training of a few steps in a folder."""
        values = {name: str(folder / name) for name in ("manifest", "lock")}
        values["output"] = str(folder)
        none = {"prompts": [], "captions": 0, "negative": None, "validates": None}
        short: TrainingOrder = order.with_settings(steps=steps, epochs=None)
        return short.model_copy(update={**values, **none, "forced": False, "keep": 0})

    def steps_done(self, order: Any, data: str) -> int:
        """Return the step of the checkpoint that a training resumes from; 0 if it begins anew."""
        return 0 if order.forced else _step_done(order, order.wanted(data))

    def check(self, order: Any, *, current: bool) -> Iterable[Finding]:
        """Check what the trainer's settings need."""
        from latentmake.runs.findings import check_settings, gpu_findings

        return [*check_settings(order.trainer), *gpu_findings()]

    def train(self, order: Path, **options: Any) -> None:
        """Bring the trained weights of an order up to date; see `Backend.train`."""
        from latentmake.trainers.loop.launch import train

        train(self.order_type, order, **options)

    @abstractmethod
    def clip_settings(self, facts: Facts, training: Any, word: str) -> tuple[str, dict[str, Any]]:
        """Return the digest of all networks that draw, and clip settings of this trainer only.

        Args:
            facts: facts about the configuration and models.
            training: order of the training.
            word: `generate`, or `evaluate` for the clips of an evaluation.

        Raises:
            UserError: the model draws no clips, or a file is missing.
        """

    def plan_following(
        self, facts: Facts, plan: RunPlan, word: str
    ) -> tuple[Path, list[Difference]]:
        """Write the order of clips or of an evaluation; see `Backend.plan_following`."""
        from latentmake.trainers.loop.generation import (
            EvaluationOrder,
            clip_reasons,
            following,
            result_reasons,
        )

        training, file_digest = plan.trainer, facts.memo.digest_of_file
        assert isinstance(training, TrainingOrder)
        order = following(facts, training, word, *self.clip_settings(facts, training, word))
        if not facts.read_only:
            order.write(order.path)
        if waits := plan.awaited(order.texts()):
            return order.path, waits
        if isinstance(order, EvaluationOrder):
            return order.path, result_reasons(order, training, file_digest)
        return order.path, clip_reasons(order, file_digest)

    def follow(self, order: Path, word: str, *, log: Path, threads: int = 2) -> Path:
        """Bring clips or the results of an evaluation up to date; return their folder."""
        from latentmake.trainers.loop.launch import follow

        return follow(order, word, log=log, threads=threads)


def _step_done(order: TrainingOrder, want: Parts) -> int:
    """Return the step of the newest checkpoint that fits; 0 for none."""
    checkpoints = resumable(order, want)
    return checkpoints[0][1].step if checkpoints else 0


def _note(order: TrainingOrder, plan: RunPlan) -> str:
    """Return a line for the plan; "" if a training begins from the start, or has ended."""
    resumed, begins, want = None, order.trainer.init_lora, None
    if plan.lock and order.weights and not order.forced:
        want = order.wanted(plan.lock)
        if holder := RunFiles(order).holder(want):
            return "" if holder.output == Path(order.output) else taken_back(plan.name)
        resumed = f"step {step}" if (step := _step_done(order, want)) else None
    if resumed is None and goes_on(order, want):
        resumed = "the last weights"
    if resumed is not None:
        return f"training of {plan.name}: goes on from {resumed}"
    return f"training of {plan.name}: begins from the LoRA {begins}" if begins else ""


def order_values(facts: Facts, name: str, trainer: LoopTrainer) -> dict[str, Any]:
    """Return the fields of a run's order that all trainers of the loop share."""
    run, samples = facts.config.runs[name], trainer.samples
    size = samples.resolution or run.resolutions[0]
    text = partial(prompt_path, facts.config, run.model)
    guided = trainer.draws and samples.guidance_scale > 1
    return {
        **run_values(name),
        "keep": facts.config.history.keep,
        "model": facts.config.models[run.model],
        "prompts": [Prompt(prompt=prompt, text=text(prompt)) for prompt in samples.prompts],
        "negative": text(samples.negative_prompt) if guided else None,
        "sample_size": (size.width, size.height),
        "trainer": trainer,
        "validates": run.validation and run.validation.every,
    }
