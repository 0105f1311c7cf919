"""Checks of a run's `generate` against its trainer and model."""

from __future__ import annotations

from latentmake.config.checks import check_sides
from latentmake.config.models import Model
from latentmake.config.runs import Run
from latentmake.errors import ConfigError


def check_generation(name: str, run: Run, model: Model) -> None:
    """Refuse clips that the run's trainer or model cannot make.

    Raises:
        ConfigError: the first mistake.
    """
    settings, where = run.generate, f"runs.{name}.generate"
    if settings is None:
        return
    if run.trainer is None or not run.trainer.generates:
        what = "the run has no trainer" if run.trainer is None else "its trainer generates no clips"
        raise ConfigError(what, where=where, hint="leave it out, or set the trainer's `kind: wan`")
    if settings.resolution is not None:
        side = model.spec.side
        check_sides([settings.resolution], side, f"{where}.resolution", f"{side}, as Wan needs")
    if settings.image is not None and not model.image_to_video:
        what = f"{model.task} draws from text alone"
        hint = "leave it out, or use an image-to-video model"
        raise ConfigError(what, where=f"{where}.image", hint=hint)
