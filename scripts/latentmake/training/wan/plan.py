"""Plan of a run of the trainer `wan`: its order, and whether it is trained."""

from __future__ import annotations

from latentmake.config.models import Model
from latentmake.config.trainers import WanTrainer
from latentmake.errors import ModelError
from latentmake.plan.facts import Facts
from latentmake.plan.run_plan import RunPlan
from latentmake.training.loop.plan import finish_plan, order_values
from latentmake.training.wan.dit import check_networks, dit_digest
from latentmake.training.wan.estimate import estimate_training
from latentmake.training.wan.order import WanOrder

_BOUNDARY = {"t2v": 0.875, "i2v": 0.9}  # Wan 2.2's, wan/configs of its release


def plan_training(facts: Facts, plan: RunPlan, *, train: bool) -> None:
    """Write the order of a run, and decide whether it is to be trained; see `Backend.plan`."""
    run = facts.config.runs[plan.name]
    trainer, model = run.trainer, facts.config.models[run.model]
    assert isinstance(trainer, WanTrainer)
    where = f"runs.{plan.name}.trainer.target_modules"
    check_networks(model, run.model, trainer.target_modules, where)
    weights = _digest(facts, model, run.model)
    order = _order(facts, plan.name, trainer, model, weights)
    finish_plan(facts, plan, order, train=train)
    if plan.training_order is not None:
        estimate = estimate_training(facts.config, plan.name, model)
        plan.forecast, plan.needs = estimate.note, [estimate.need]


def _digest(facts: Facts, model: Model, name: str) -> str:
    try:
        return dit_digest(model, facts.memo.digest_of_file)
    except ModelError as error:
        raise ModelError(
            f"{error.where}: {error.what}", where=f"models.{name}.dit", hint=error.hint
        ) from None


def boundary_of(trainer: WanTrainer, model: Model) -> float | None:
    """Return the share of the timesteps from which Wan 2.2's network for high noise is used.

    Returns:
        None for a model with one network.
    """
    if model.version.boundary is None:
        return None
    if trainer.timestep_boundary is not None:
        return trainer.timestep_boundary / 1000
    return _BOUNDARY["i2v" if model.image_to_video else "t2v"]


def _order(facts: Facts, name: str, trainer: WanTrainer, model: Model, weights: str) -> WanOrder:
    return WanOrder(
        dit=model.dit,
        dit_high_noise=model.dit_high_noise,
        task=str(model.task),
        image_to_video=model.image_to_video,
        needs_clip=model.needs_clip,
        flow_shift=trainer.shift(facts.config.runs[name].resolutions),
        boundary=boundary_of(trainer, model),
        weights=weights,
        **order_values(facts, name, trainer),
    )
