"""Checks of a run's networks and resolutions, before anything of it is looked for or encoded."""

from __future__ import annotations

from pathlib import Path

from latentmake.config import Run, SdTrainer
from latentmake.errors import ConfigError
from latentmake.models import checks, shapes
from latentmake.plan.facts import Facts

__all__ = ["check_resolutions", "check_run"]

_USUAL_FACTOR = 8  # pixels a latent: that of every Stable Diffusion VAE


def check_run(facts: Facts, name: str, run: Run) -> None:
    """Refuse networks of another kind than their keys say, and sizes and settings they lack.

    Raises:
        UserError: the first mistake.
    """
    model, key = facts.config.models[run.model], f"models.{run.model}"
    if not model.spec.original_files:  # whose files the recipe looks at
        checks.check_kind(model.vae, "vae", f"{key}.vae")
        for place in model.text:
            checks.check_kind(place, "text", f"{key}.text")
        if model.unet is not None:
            checks.check_kind(model.unet, "unet", f"{key}.unet")
    check_resolutions(facts, name, run)
    trainer = run.trainer
    if isinstance(trainer, SdTrainer) and model.unet is not None:
        if (names := checks.parameter_names(model.unet)) is not None:
            checks.check_names(trainer, names, f"runs.{name}.trainer")
        scheduler = checks.schedule_of(model.unet, model.scheduler)
        if scheduler and (Path(scheduler) / "scheduler_config.json").is_file():
            checks.read_schedule(scheduler, trainer.prediction_type)


def check_resolutions(facts: Facts, name: str, run: Run) -> None:
    """Refuse a resolution that the VAE cannot encode without cutting more off.

    Raises:
        ConfigError: the first mistake.
    """
    model = facts.config.models[run.model]
    if not facts.layout(run.model).any_size:
        return  # the configuration has been checked for its rule
    known = None if facts.is_pending(model.vae.path) else shapes.vae_factor(model.vae)
    factor = known or _USUAL_FACTOR
    asked = [("resolutions", size) for size in run.resolutions]
    if run.trainer and (size := run.trainer.sample_resolution):
        asked.append(("trainer.samples.resolution", size))
    for key, size in asked:
        for side in (size.width, size.height):
            if side % factor:
                below = side // factor * factor
                near = [str(each) for each in (below, below + factor) if each > 0]
                raise ConfigError(
                    f"{side} pixels are not a multiple of the VAE's factor {factor}",
                    where=f"runs.{name}.{key}",
                    mend=f"use {' or '.join(near)}",
                )
    for dataset in run.datasets:
        settings = facts.config.datasets[dataset]
        steps, where = settings.bucket_steps, f"datasets.{dataset}.bucket_reso_steps"
        if settings.fit != "bucket":
            continue
        if steps % factor:
            raise ConfigError(
                f"{steps} is not a multiple of the VAE's factor {factor}",
                where=where,
                mend=f"use a multiple of {factor}",
            )
        for size in run.resolutions:
            if size.width * size.height < steps**2:
                raise ConfigError(
                    f"{steps} is more than the resolution {size.name} has",
                    where=where,
                    mend="use smaller steps or a larger resolution",
                )
