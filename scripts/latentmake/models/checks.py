"""Checks of a run's networks against their keys and the trainer's settings, by headers alone.

The planner refuses what a job would refuse after it has started; trainers check what the planner
could not see, such as a model on another machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Literal

from latentmake.config.checks import check_sides, check_steps
from latentmake.config.datasets import BUCKET_STEPS
from latentmake.config.root import Config
from latentmake.config.runs import Run
from latentmake.config.weights import Weights
from latentmake.errors import ConfigError, ModelError
from latentmake.layouts.layout import layout_of
from latentmake.models import checkpoints
from latentmake.models.files import network_config, vae_factor
from latentmake.models.kinds import kinds_of, one, tensors_of

Role = Literal["vae", "unet", "text"]
"""Key of a Stable Diffusion model that takes a network."""

_WORDS: Mapping[Role, str] = {"vae": "a VAE", "unet": "a UNet", "text": "a text encoder"}
# Beginnings of class names in the configurations of diffusers' networks; transformers has many.
_CLASSES: Mapping[str, Role] = {
    **dict.fromkeys(("Autoencoder", "VQModel", "ConsistencyDecoderVAE"), "vae"),
    "UNet": "unet",
}
_FAMILIES: Mapping[Role, frozenset[str]] = {
    "vae": frozenset({"VAE"}),
    "unet": frozenset({"UNet", "DiT"}),  # SD 3's is a DiT
    "text": frozenset({"T5", "CLIP text encoder", "language model"}),
}
_USUAL_FACTOR = 8  # pixels a latent: that of every Stable Diffusion VAE


def check_run(config: Config, name: str, run: Run) -> None:
    """Refuse networks of another kind than their keys say, and sizes that the VAE cannot encode."""
    model, key = config.models[run.model], f"models.{run.model}"
    if not model.spec.original_files:  # whose files the recipe looks at
        places: tuple[tuple[Role, Weights | None], ...] = (
            ("vae", model.vae),
            *(("text", place) for place in model.text),
            ("unet", model.unet),
        )
        for role, place in places:
            if place is not None and checkpoints.part_of(place):
                checkpoints.check(place, model.architecture, f"{key}.checkpoint")
            elif place is not None:
                check_kind(place, role, f"{key}.{role}")
    if layout_of(model.layout_name).external:
        return  # the configuration has been checked for its rule
    factor = vae_factor(model.vae) or _USUAL_FACTOR
    reason = f"the VAE's factor {factor}"
    check_sides(run.resolutions, factor, f"runs.{name}.resolutions", reason)
    samples = getattr(run.trainer, "samples", None)
    if samples and (size := samples.resolution):
        check_sides([size], factor, f"runs.{name}.trainer.samples.resolution", reason)
    for dataset in run.datasets:
        settings = config.datasets[dataset]
        if settings.fit != "bucket":
            continue
        if (steps := settings.bucket_reso_steps or BUCKET_STEPS) % factor:
            what, hint = f"{steps} is not a multiple of {reason}", f"use a multiple of {factor}"
            raise ConfigError(what, where=f"datasets.{dataset}.bucket_reso_steps", hint=hint)
        check_steps(run.resolutions, steps, dataset)


def check_kind(weights: Weights, expected: Role, where: str) -> None:
    """Refuse a network of another kind than its key says; an unknown one passes.

    Args:
        weights: where it is.
        expected: its key.
        where: its key in the configuration, in full.

    Raises:
        ModelError: it is of another kind.
    """
    path, name, found = Path(weights.path or ""), "", ""
    if weights.path is None or not path.exists():
        return
    with suppress(ModelError):  # its loader says so
        values = network_config(weights) or {}
        several = values.get("architectures")
        names = [values.get("_class_name"), *(several if isinstance(several, list) else ())]
        name = str(next(filter(None, names), ""))
    if name and next((_CLASSES[x] for x in _CLASSES if name.startswith(x)), "text") != expected:
        found = name
    elif path.is_file() and path.suffix == ".safetensors":
        with suppress(ValueError):
            kinds = kinds_of(tensors_of(path))
            if kinds and not _FAMILIES[expected] & kinds.keys():
                found = one(next(iter(kinds.values())))
    if found:
        named = "" if where == weights.path else f"{weights.path} "
        hint = f"name the folder or file of {_WORDS[expected]}"
        raise ModelError(f"{named}holds {found}, not {_WORDS[expected]}", where=where, hint=hint)
