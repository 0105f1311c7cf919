"""Checks of a run of the trainer `wan` against its model."""

from __future__ import annotations

from latentmake.config.models import Model
from latentmake.config.trainers import WanTrainer
from latentmake.errors import ConfigError


def check_wan(name: str, trainer: WanTrainer, model: Model) -> None:
    """Refuse a model that the trainer does not train, and sample clips that it cannot draw.

    Raises:
        ConfigError: the first mistake.
    """
    task = str(model.task)
    if not model.spec.encodes or task.endswith("-FC") or task.startswith("flf2v"):
        what = f"the trainer wan does not train {model.task or model.title}"
        hint = "use kind: musubi"
        raise ConfigError(what, where=f"runs.{name}.trainer.kind", hint=hint)
    _check_boundary(f"runs.{name}.trainer.timestep_boundary", trainer, model)
    if trainer.samples.prompts and model.image_to_video:
        what = f"{task} draws from a picture, and sample clips are drawn from prompts alone"
        raise ConfigError(what, where=f"runs.{name}.trainer.samples", hint="leave them out")
    size = trainer.samples.resolution
    side = model.spec.side
    if size is not None and (size.width % side or size.height % side):
        what = f"{size.name} is not made of multiples of {side}, as Wan needs"
        where = f"runs.{name}.trainer.samples.resolution"
        raise ConfigError(what, where=where, hint="use [832, 480] or the like")


def _check_boundary(where: str, trainer: WanTrainer, model: Model) -> None:
    boundary = trainer.timestep_boundary
    if boundary is None:
        return
    if not model.has_two_networks:
        what = f"{model.task} has one network, and no boundary between two"
        raise ConfigError(what, where=where, hint="leave it out")
    for key, path, none in (
        ("dit", model.dit, 0),
        ("dit_high_noise", model.dit_high_noise, 1000),
    ):
        if path is not None and boundary == none:
            what = f"{boundary} leaves no timesteps to train `{key}` on"
            raise ConfigError(what, where=where, hint=f"leave it out, or the model's `{key}`")
