"""Command lines of musubi-tuner's caching and training scripts, as lists of arguments.

Scripts, flags, versions, the LoRA's module and files of weights come from the row of the
architecture, see `config.architectures`. Paths come in as the machine that runs the command names
them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection
from pathlib import Path

from latentmake.config.architectures import Setting
from latentmake.config.machines import ExternalProgram
from latentmake.config.models import Model
from latentmake.config.weights import Weights
from latentmake.index.memo import Memo
from latentmake.models.files import script_of
from latentmake.models.headers import weight_file
from latentmake.training.external.installation import Installation
from latentmake.training.external.musubi.order import MusubiOrder, find
from latentmake.training.external.order import (
    Places,
    Resume,
    absolute,
    command_line,
    located,
    sampling,
)

_NETWORKS = ("dit", "dit_high_noise")  # read by the training script from one file each


def training_arguments(
    order: MusubiOrder, places: Places, attention: str, resume: Resume
) -> list[str]:
    """Return the arguments of the training script.

    Args:
        order: the run.
        places: paths on the machine that trains.
        attention: one that the row of the architecture names.
        resume: where the training is resumed; with no epoch left, it writes its LoRA.
    """
    order = located(order.left(resume), places.of)
    trainer, scripts, boundary = order.trainer, order.scripts, order.trainer.timestep_boundary
    if boundary is None:
        boundary = order.model.version.boundary
    files = _weights(order, places.of)
    if trainer.samples.prompts:
        switches = [*scripts.latents.switches, *scripts.text.switches]
        files |= {flag: bool(getattr(order.model, key)) for flag, key in switches}
    arguments = command_line(
        {
            "--dataset_config": places.toml,
            **files,
            "--timestep_boundary": boundary if "--dit_high_noise" in files else None,
            f"--{attention}": True,
            "--mixed_precision": trainer.mixed_precision,
            **order.network,
            "--learning_rate": trainer.learning_rate,
            # Always given: the documented default is not applied, and the script then fails late.
            "--optimizer_type": trainer.optimizer_type,
            "--gradient_checkpointing": trainer.gradient_checkpointing,
            "--seed": trainer.seed,
            "--max_train_epochs": order.epochs,
            "--max_train_steps": trainer.max_train_steps,
            "--gradient_accumulation_steps": trainer.gradient_accumulation_steps,
            "--max_data_loader_n_workers": trainer.max_data_loader_n_workers,
            "--timestep_sampling": trainer.timestep_sampling,
            "--discrete_flow_shift": trainer.discrete_flow_shift,
            "--fp8_base": trainer.fp8_base,
            "--fp8_scaled": trainer.fp8_scaled,
            "--save_every_n_epochs": trainer.save_every_n_epochs,
            "--save_state": trainer.save_every_n_epochs is not None,
            "--output_dir": places.output,
            "--output_name": order.run,
            "--logging_dir": places.logs if trainer.logging else None,
            "--resume": None if resume.state is None else absolute(resume.state),
            **sampling(order, places.prompts),
            **order.flags,
        }
    )
    return [*order.model.version.training, *arguments, *trainer.arguments]


def _weights(order: MusubiOrder, named: Callable[[str], str]) -> dict[str, Setting]:
    """Return the flags and paths of the weights that the training script takes.

    `named` gives a path as the machine that trains names it; an id on the hub stays.
    """
    scripts, found = order.scripts, dict[str, Setting]()
    drawing = [*scripts.latents.files, *scripts.text.files] if order.trainer.samples.prompts else []
    for file in (*drawing, *scripts.training.files):
        weights = order.model.weights(file.key)
        if weights is not None and weights.path is None:
            found[file.flag] = weights.hub
        elif weights is not None and weights.path is not None:
            path = weights.path
            if file.key in _NETWORKS:  # a folder stands for its first file
                with contextlib.suppress(ValueError):  # it may lie on another machine
                    path = str(weight_file(Path(path)))
            found[file.flag] = named(path)
    return found


def caching_arguments(
    model: Model,
    kind: str,
    *,
    dataset_config: str,
    place: Callable[[Weights], str],
    batch_size: int | None = None,
    num_workers: int | None = None,
    skip_existing: bool = True,
    keep_cache: bool = True,
) -> list[str]:
    """Return the arguments of the script that caches `latents` or `text` of a model.

    Args:
        model: one that musubi-tuner knows.
        kind: `latents` or `text`.
        dataset_config: path of the dataset TOML.
        place: returns the path of weights.
        batch_size: items encoded at once; None leaves it to the script.
        num_workers: workers that read images; None leaves it to the script.
        skip_existing: pass over items that have a cache file.
        keep_cache: leave cache files alone that belong to no item.
    """
    script = script_of(model, kind)
    files = {
        file.flag: None if (weights := model.weights(file.key)) is None else place(weights)
        for file in script.files
    }
    dtype = model.text_dtype if kind == "text" else model.vae_dtype
    if dtype is None and model.spec.encodes and kind != "text":
        dtype = model.dtype  # as ours would encode
    arguments = command_line(
        {
            "--dataset_config": dataset_config,
            **files,
            **({script.dtype_flag: dtype} if script.dtype_flag else {}),
            **{flag: bool(getattr(model, key)) for flag, key in script.switches},
            "--batch_size": batch_size,
            "--num_workers": num_workers,
            "--skip_existing": skip_existing,
            "--keep_cache": keep_cache,
        }
    )
    return [*model.version.caching(kind), *arguments, *model.further_arguments(kind)]


MODULES = {"flash_attn": "flash_attn", "flash3": "flash_attn_interface", "xformers": "xformers"}
"""Attention -> the package that has it, if torch does not."""
PREFERRED = ("flash_attn", "xformers")  # SageAttention has no backward pass
_UNUSED = ("networks",)  # LoRAs: imported by helpers that load weights, and taken by no such script


def program_digest(
    settings: ExternalProgram, model: Model, kind: str, memory: Memo | None = None
) -> str:
    """Return the digest of its own sources that cache `latents` or `text`; raises TrainingError."""
    assert model.spec.scripts is not None
    installation, name = find(settings, model.spec.scripts, memory), script_of(model, kind).name
    installation.script(name)
    # Caches of Wan's scripts are as old as their recipe, in which all that is imported counts.
    without = () if model.spec.encodes else _UNUSED
    return installation.sources_of(name, without).digest


def pick_attention(
    attention: str, installation: Installation, *, among: Collection[str] = PREFERRED
) -> str:
    """Return the flag of the attention to train with, without its dashes.

    Args:
        attention: the trainer's setting. `auto` is the fastest that its environment has and its
            version takes: flash-attn, xformers, else torch's own (sdpa).
        installation: the trainer's.
        among: what the architecture's network takes.
    """
    if attention != "auto":
        return attention
    known = installation.sources_of().flags
    names = [x for x in PREFERRED if x in among and (known is None or f"--{x}" in known)]
    lacks = installation.lacking(MODULES[name] for name in names) if names else ()
    return next((name for name in names if MODULES[name] not in lacks), "sdpa")
