"""The trainer `wan` as a backend: the order of a run, its checks, its clips."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from latentmake.plan.facts import Facts
from latentmake.plan.manifest import rows_of
from latentmake.plan.run_plan import RunPlan
from latentmake.plan.state import Difference
from latentmake.training.loop.plan import LoopBackend, begun, order_values
from latentmake.training.process import RUN, run_child
from latentmake.training.wan.clips import (
    EvaluationOrder,
    clip_reasons,
    evaluation_order,
    generation_order,
    order_of,
    result_reasons,
)
from latentmake.training.wan.dit import (
    PLACES,
    WanOrder,
    boundary_of,
    check_lora,
    check_networks,
    dit_digest,
    trained_networks,
)
from latentmake.training.wan.estimate import estimate_training

if TYPE_CHECKING:
    from latentmake.training.backend import Finding
    from latentmake.training.wan.recipe import WanRecipe


class Wan(LoopBackend):
    """The trainer `wan`."""

    order_type = WanOrder
    memory_hint = (
        "lower the run's `resolutions` or the dataset's `target_frames`, or set "
        "`gradient_checkpointing: true` and `optimizer: adamw8bit`"
    )

    def order(self, facts: Facts, run: str) -> WanOrder:
        """Return the order of a run."""
        settings = facts.config.runs[run]
        trainer: Any = settings.trainer
        model = facts.config.models[settings.model]
        where = f"runs.{run}.trainer.target_modules"
        layers = check_networks(model, settings.model, trainer.target_modules, where)
        order = WanOrder(
            dit=model.dit,
            dit_high_noise=model.dit_high_noise,
            task=str(model.task),
            image_to_video=model.image_to_video,
            needs_clip=model.needs_clip,
            flow_shift=trainer.shift(settings.resolutions),
            boundary=boundary_of(trainer, model),
            weights=dit_digest(model, facts.memo.digest_of_file),
            **order_values(facts, run, trainer),
        )
        return begun(order, facts, layers, PLACES)

    def recipe(self, order: WanOrder) -> WanRecipe:
        """Return the recipe of an order."""
        from latentmake.training.wan.recipe import WanRecipe

        return WanRecipe(order)

    def plan(self, facts: Facts, plan: RunPlan, *, train: bool) -> None:
        """Write the order of a run; decide whether it is to be trained, and estimate that."""
        super().plan(facts, plan, train=train)
        if plan.training_order is not None:
            model = facts.config.models[facts.config.runs[plan.name].model]
            estimate = estimate_training(facts.config, plan.name, model)
            plan.forecast, plan.needs = estimate.note, [estimate.need]

    def check(self, order: Any, *, current: bool) -> Iterable[Finding]:
        """Check the networks, and what the trainer's settings need."""
        from latentmake.training.backend import image_findings, model_finding

        yield from map(model_finding, trained_networks(order))
        if current:  # the caches have musubi-tuner's pixels
            sources = (row.source for row in rows_of(Path(order.manifest)))
            yield from image_findings(sources)
        yield from super().check(order, current=current)

    def plan_following(
        self, facts: Facts, plan: RunPlan, word: str
    ) -> tuple[Path, list[Difference]]:
        """Write the order of clips or of an evaluation; see `Backend.plan_following`."""
        training, file_digest = plan.trainer, facts.memo.digest_of_file
        assert isinstance(training, WanOrder)
        order = (generation_order if word == "generate" else evaluation_order)(facts, training)
        if not facts.asks:
            order.write(order.path)
        if waits := plan.awaited(order.texts()):
            return order.path, waits
        if isinstance(order, EvaluationOrder):
            return order.path, result_reasons(order, training, file_digest)
        if order.lora is not None:  # this run's training may have saved it
            check_lora(order.adapters, training.results, f"runs.{plan.name}.generate.lora")
        return order.path, clip_reasons(order, file_digest)

    def follow(self, order: Path, word: str, *, log: Path, threads: int = 2) -> Path:
        """Bring clips or the results of an evaluation up to date; return their folder."""
        found = order_of(order, word)
        folder = Path(found.output)
        if word == "evaluate" or clip_reasons(found):
            run_child(
                [sys.executable, *RUN, str(order), word],
                run=found.run,
                folder=folder,
                threads=threads,
                log=log,
                online=bool(found.model.vae.hub),
            )
        return folder

    def follow_here(self, order: Path, word: str) -> None:
        """Draw clips or evaluate in this process."""
        from latentmake.training.wan.draw import evaluate, generate

        found = order_of(order, word)
        if isinstance(found, EvaluationOrder):
            evaluate(found)
        else:
            generate(found)
