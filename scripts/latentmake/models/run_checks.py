"""Checks of a run's networks and resolutions, before anything of it is looked for or encoded."""

from __future__ import annotations

from latentmake import layouts
from latentmake.config.checks import check_sides, check_steps
from latentmake.config.root import Config
from latentmake.config.runs import Run
from latentmake.errors import ConfigError
from latentmake.models import checkpoints, checks

_USUAL_FACTOR = 8  # pixels a latent: that of every Stable Diffusion VAE


def check_run(config: Config, name: str, run: Run) -> None:
    """Refuse networks of another kind than their keys say, and sizes that they cannot have."""
    model, key = config.models[run.model], f"models.{run.model}"
    if not model.spec.original_files:  # whose files the recipe looks at
        for part in filter(None, (model.vae, *model.text, model.unet)):
            checkpoints.check(part, model.architecture, f"{key}.checkpoint")
        checks.check_kind(model.vae, "vae", f"{key}.vae")
        for place in model.text:
            checks.check_kind(place, "text", f"{key}.text")
        if model.unet is not None:
            checks.check_kind(model.unet, "unet", f"{key}.unet")
    check_resolutions(config, name, run)


def check_resolutions(config: Config, name: str, run: Run) -> None:
    """Refuse a resolution that the VAE cannot encode without cutting more off."""
    from latentmake.models import shapes

    model = config.models[run.model]
    if not layouts.of(model.layout_name).any_size:
        return  # the configuration has been checked for its rule
    factor = shapes.vae_factor(model.vae) or _USUAL_FACTOR
    reason = f"the VAE's factor {factor}"
    check_sides(run.resolutions, factor, f"runs.{name}.resolutions", reason)
    if run.trainer and (size := run.trainer.sample_resolution):
        check_sides([size], factor, f"runs.{name}.trainer.samples.resolution", reason)
    for dataset in run.datasets:
        settings = config.datasets[dataset]
        steps = settings.bucket_steps
        if settings.fit != "bucket":
            continue
        if steps % factor:
            where = f"datasets.{dataset}.bucket_reso_steps"
            what = f"{steps} is not a multiple of {reason}"
            raise ConfigError(what, where=where, hint=f"use a multiple of {factor}")
        check_steps(run.resolutions, steps, dataset)
