"""Backend of the trainer `wan`: make the order of a run, check it, and plan its clips."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from latentmake.base.errors import ConfigError
from latentmake.plan.facts import Facts
from latentmake.plan.run_plan import RunPlan
from latentmake.runs.findings import Finding, image_findings, model_finding
from latentmake.runs.rows import rows_of
from latentmake.trainers.loop.plan import LoopBackend, order_values
from latentmake.trainers.wan.dit import (
    PLACES,
    WanOrder,
    boundary_of,
    check_networks,
    dit_digest,
    made_of,
    trained_networks,
)
from latentmake.trainers.wan.estimate import estimate_training, longest_clip

if TYPE_CHECKING:
    from latentmake.trainers.wan.recipe import WanRecipe


_FRAMES = 81  # default length of a clip after a training on images


class Wan(LoopBackend):
    """Backend of the trainer `wan`."""

    order_type = WanOrder
    memory_hint = (
        "lower the run's `resolutions` or the dataset's `target_frames`, or set "
        "`gradient_checkpointing: true` and `optimizer: adamw8bit`"
    )

    def order(self, facts: Facts, run: str) -> WanOrder:
        """Return the order of a run; check its networks.

        Raises:
            ModelError: a network is missing, damaged, or for another task.
            TrainingError: `target_modules` names layers that cannot have a LoRA.
        """
        settings = facts.config.runs[run]
        trainer: Any = settings.trainer
        model = facts.config.models[settings.model]
        where = f"runs.{run}.trainer.target_modules"
        layers = check_networks(model, settings.model, trainer.target_modules, where)
        order = WanOrder(
            flow_shift=trainer.shift(settings.resolutions),
            boundary=boundary_of(trainer, model),
            weights=dit_digest(model, facts.memo.digest_of_file),
            **order_values(facts, run, trainer),
        )
        return order.begun(facts.memo.digest_of_file, layers, PLACES)

    def recipe(self, order: WanOrder) -> WanRecipe:
        """Return the recipe of an order."""
        from latentmake.trainers.wan.recipe import WanRecipe

        return WanRecipe(order)

    def plan(self, facts: Facts, plan: RunPlan, *, train: bool) -> None:
        """Write the order of a run; decide whether to train, and estimate memory, disk and time."""
        super().plan(facts, plan, train=train)
        if plan.training_order is not None:
            model = facts.config.models[facts.config.runs[plan.name].model]
            _, need, plan.forecast = estimate_training(facts.config, plan.name, model)
            plan.needs = [need]

    def check(self, order: Any, *, current: bool) -> Iterable[Finding]:
        """Check the networks, the images, and the needs of the trainer's settings."""
        yield from map(model_finding, trained_networks(order.model))
        if current:  # caches of Wan contain the same pixels as musubi-tuner's
            sources = (row.source for row in rows_of(Path(order.manifest)))
            yield from image_findings(sources)
        yield from super().check(order, current=current)

    def clip_settings(self, facts: Facts, training: Any, word: str) -> tuple[str, dict[str, Any]]:
        """Return the digest of Wan's networks and encoders, and the settings of its clips."""
        config = facts.config
        run = config.runs[training.run]
        model, settings = config.models[run.model], config.generation(run)
        size = settings.resolution or run.resolutions[0]
        longest = longest_clip(config, run)
        more = {
            "frames": settings.frames or (longest if longest > 1 else _FRAMES),
            "fps": settings.fps,
            "flow_shift": settings.flow_shift or training.trainer.shift([size]),
            "scheduler": settings.scheduler,
            "timestep_boundary": training.boundary,
            "image": _first_frame(facts, training) if word == "generate" else None,
        }
        return made_of(model, run.model, facts.memo.digest_of_file), more


def _first_frame(facts: Facts, training: WanOrder) -> str | None:
    """Return the digest of the picture that clips begin with; None if there is none.

    Raises:
        ConfigError: the picture cannot be read, the task needs one that is not set, or the task
            needs pictures that no key can name.
    """
    config, where = facts.config, f"runs.{training.run}"
    run = config.runs[training.run]
    model, image = config.models[run.model], config.generation(run).image
    task = str(model.task)
    if not model.version.ours:
        what = f"{task} draws from further pictures, which generate_{training.run} cannot give it"
        hint = "generate with musubi-tuner, which takes the LoRA"
        raise ConfigError(what, where=f"{where}.model", hint=hint)
    if image is not None:
        try:
            return facts.memo.digest_of_file(Path(image))
        except OSError as error:
            what = f"{image} cannot be read ({error.strerror})"
            hint = "check that the file exists and is readable"
            raise ConfigError(what, where=f"{where}.generate.image", hint=hint) from None
    if model.image_to_video:
        what, hint = f"{task} draws from a picture", "name the file of the clips' first frame"
        raise ConfigError(what, where=f"{where}.generate.image", hint=hint)
    return None
