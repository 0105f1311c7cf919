"""Checks of a run's networks against their keys and the trainer's settings, by headers alone.

The planner refuses what a job would refuse after it has started; trainers check what the planner
could not see, such as a model on another machine.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from latentmake import layouts
from latentmake.config.checks import check_sides, check_steps
from latentmake.config.root import Config
from latentmake.config.runs import Run
from latentmake.config.trainers import SdTrainer
from latentmake.config.weights import Weights
from latentmake.errors import ConfigError, ModelError, TrainingError
from latentmake.files.safetensors import read_head
from latentmake.models import checkpoints
from latentmake.models.files import network_config, weights_files
from latentmake.models.shapes import vae_factor
from latentmake.regular import read_regular

if TYPE_CHECKING:
    from latentmake.models.kinds import Role

_WORDS: dict[Role, str] = {"vae": "a VAE", "unet": "a UNet", "text": "a text encoder"}
# Beginnings of class names in the configurations of diffusers' networks; transformers has many.
_CLASSES: dict[str, Role] = {
    **dict.fromkeys(("Autoencoder", "VQModel", "ConsistencyDecoderVAE"), "vae"),
    "UNet": "unet",
}
_USUAL_FACTOR = 8  # pixels a latent: that of every Stable Diffusion VAE
# diffusers' names: attn1 attends to the picture itself, attn2 to the text.
_PARTS = {
    "unet": r"",
    "norms": r"norm",
    "attention": r"(^|\.)attn[12]\.",
    "cross_attention": r"(^|\.)attn2\.",
    "cross_attention_qk": r"(^|\.)attn2\.to_[qk]\.",
    "cross_attention_out": r"(^|\.)attn2\.to_out\.",
}


def check_run(config: Config, name: str, run: Run) -> None:
    """Refuse networks of another kind than their keys say, and sizes that the VAE cannot encode."""
    model, key = config.models[run.model], f"models.{run.model}"
    if not model.spec.original_files:  # whose files the recipe looks at
        roles: tuple[tuple[Role, Weights | None], ...] = (
            ("vae", model.vae),
            *(("text", place) for place in model.text),
            ("unet", model.unet),
        )
        for _, place in roles:
            if place is not None and checkpoints.part_of(place):
                checkpoints.check(place, model.architecture, f"{key}.checkpoint")
        for role, place in roles:
            if place is not None:
                check_kind(place, role, f"{key}.{role}")
    if not layouts.of(model.layout_name).any_size:
        return  # the configuration has been checked for its rule
    factor = vae_factor(model.vae) or _USUAL_FACTOR
    reason = f"the VAE's factor {factor}"
    check_sides(run.resolutions, factor, f"runs.{name}.resolutions", reason)
    if run.trainer and (size := run.trainer.sample_resolution):
        check_sides([size], factor, f"runs.{name}.trainer.samples.resolution", reason)
    for dataset in run.datasets:
        settings = config.datasets[dataset]
        if settings.fit != "bucket":
            continue
        if (steps := settings.bucket_steps) % factor:
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
    path = Path(weights.path or "")
    if weights.path is None or not path.exists():
        return
    values, found = {}, ""
    with suppress(ModelError):  # its loader says so
        values = network_config(weights) or {}
    several = values.get("architectures")
    names = [values.get("_class_name"), *(several if isinstance(several, list) else ())]
    if name := str(next(filter(None, names), "")):
        role = next((_CLASSES[x] for x in _CLASSES if name.startswith(x)), "text")
        found = name if role != expected else ""
    if not found and path.is_file() and path.suffix == ".safetensors":
        from latentmake.models.kinds import misfit

        with suppress(OSError, ValueError):
            found = misfit(read_head(path).entries, expected)
    if found:
        named = "" if where == weights.path else f"{weights.path} "
        hint = f"name the folder or file of {_WORDS[expected]}"
        raise ModelError(f"{named}holds {found}, not {_WORDS[expected]}", where=where, hint=hint)


def parameter_names(unet: Weights) -> list[str] | None:
    """Return the names of a UNet's parameters, from the headers of its files.

    Returns:
        None where headers do not tell: on the hub, in torch's format, or under original names.
    """
    if unet.path is None or not Path(unet.path).exists():
        return None
    try:
        files = [file for file in weights_files(unet) if file.suffix != ".json"]
    except ModelError:
        return None
    if any(file.suffix != ".safetensors" for file in files):
        return None
    names: list[str] = []
    with suppress(OSError, ValueError):  # its loader says so
        names = [name for file in files for name in read_head(file).entries]
    return names if any(name.startswith("down_blocks.") for name in names) else None


def parameters_of(part: str, names: Iterable[str]) -> set[str]:
    """Return the names of parameters that belong to a named part of a UNet."""
    pattern = re.compile(_PARTS.get(part, rf"^{re.escape(part)}\."))
    return {name for name in names if pattern.search(name)}


def check_names(trainer: SdTrainer, parameters: Collection[str], where: str) -> None:
    """Refuse names of layers and parts that a UNet does not have.

    peft's rule for `target_modules`: a layer's name, or its end after a dot.

    Args:
        trainer: the settings.
        parameters: names of the UNet's parameters.
        where: the trainer's key in the configuration.

    Raises:
        TrainingError: one of `target_modules`, `parts` or `reinitialize` fits nothing.
    """
    if trainer.adapter == "lora":
        layers = {name.rpartition(".")[0] for name in parameters}
        for target in trainer.target_modules:
            if not any(name == target or name.endswith("." + target) for name in layers):
                raise TrainingError(
                    f"no layer of the UNet is named `{target}`",
                    where=f"{where}.target_modules",
                    hint="the usual ones are to_q, to_k, to_v, to_out.0",
                )
    for key, parts in (("parts", trainer.parts), ("reinitialize", trainer.reinitialize)):
        for part in parts:
            if not parameters_of(part, parameters):
                raise TrainingError(
                    f"this UNet has no `{part}`",
                    where=f"{where}.{key}",
                    hint="see how many blocks its config.json has; the first is 0",
                )


def schedule_of(unet: Weights, scheduler: str | None) -> str:
    """Return the folder of a model's noise schedule, by default the one beside the UNet.

    A checkpoint without such a folder has Stable Diffusion's.

    Args:
        unet: the model's.
        scheduler: as configured.

    Returns:
        "" for that of the UNet's repository on the hub.
    """
    if scheduler is not None or unet.path is None:
        return scheduler or ""
    beside = Path(unet.path).with_name("scheduler")
    return str(
        checkpoints.SCHEDULE if checkpoints.part_of(unet) and not beside.is_dir() else beside
    )


def read_schedule(
    scheduler: str | Path, prediction: str | None, unet: Weights | None = None
) -> dict[str, Any]:
    """Read the configuration of a noise schedule, and check that it can be trained with.

    Args:
        scheduler: as `schedule_of` returns it.
        prediction: of the network; None for the schedule's own.
        unet: the network, for a schedule on the hub.

    Raises:
        ModelError: it is missing or damaged, or the network predicts something else.
    """
    place = Path(scheduler)
    file: Path | str = place / "scheduler_config.json" if place.is_dir() else place
    try:
        if not scheduler and unet is not None:
            file = f"{unet.hub}@{unet.revision}/scheduler"
            config = _on_hub(unet)
        else:
            config = dict(json.loads(read_regular(file)))
    except (OSError, ValueError, TypeError, RecursionError):
        raise ModelError(
            "this noise schedule is missing or damaged",
            where=file,
            hint="set the model's `scheduler` to the folder of a diffusers scheduler",
        ) from None
    flows = str(config.get("_class_name", "")).startswith("FlowMatch")
    if flows and prediction in ("epsilon", "v_prediction"):
        raise ModelError(
            f"this noise schedule is one of flow matching, and `prediction_type: {prediction}` one "
            "of diffusion",
            where=file,
            hint="leave out the trainer's `prediction_type`, or set the model's `scheduler` to one "
            "of diffusion",
        )
    predicted = prediction or config.get("prediction_type", "epsilon")
    if not flows and predicted not in ("epsilon", "v_prediction", "flow_matching"):
        raise ModelError(
            f"a network that predicts `{predicted}` cannot be trained",
            where=file,
            hint="set the trainer's `prediction_type` to epsilon, v_prediction or flow_matching",
        )
    return config


def _on_hub(unet: Weights) -> dict[str, Any]:
    """Return the schedule of a UNet's repository, fetched where it is not there yet."""
    from diffusers import DDPMScheduler  # never while planning

    scheduler: Any = DDPMScheduler
    return dict(scheduler.load_config(unet.hub, subfolder="scheduler", revision=unet.revision))
