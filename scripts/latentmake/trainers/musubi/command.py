"""Command lines of musubi-tuner's caching and training scripts, as lists of arguments.

The row of the architecture in `config.architectures` defines scripts, flags, versions, the LoRA's
module and the files of weights. Paths are those of the machine that runs the command.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path

from latentmake.config.makers import Setting
from latentmake.config.models import Model
from latentmake.config.weights import Weights
from latentmake.models.headers import weight_file
from latentmake.trainers.launched.order import (
    Places,
    Resume,
    absolute,
    command_line,
    located,
    sampling,
)
from latentmake.trainers.musubi.order import MusubiOrder

_NETWORKS = ("dit", "dit_high_noise")  # the training script reads each from one file


def training_arguments(
    order: MusubiOrder, places: Places, attention: str, resume: Resume
) -> list[str]:
    """Return the arguments of the training script.

    Args:
        order: order of the run.
        places: paths on the machine that trains.
        attention: attention that the row of the architecture names.
        resume: state to resume from. If no epoch is left, the script only writes its LoRA.
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
            # Always set, because the script does not apply its documented default, and fails late.
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

    `named` gives the name of a path on the machine that trains. An id on the hub is not changed.
    """
    scripts, options = order.scripts, dict[str, Setting]()
    encoders = []
    if order.trainer.samples.prompts:
        encoders = [*scripts.latents.files, *scripts.text.files]
    for file in (*encoders, *scripts.training.files):
        weights = order.model.weights(file.key)
        if weights is not None and weights.path is None:
            options[file.flag] = weights.hub
        elif weights is not None and weights.path is not None:
            path = weights.path
            if file.key in _NETWORKS:  # a folder stands for its first file
                with contextlib.suppress(ValueError):  # the file may be on another machine
                    path = str(weight_file(Path(path)))
            options[file.flag] = named(path)
    return options


def caching_arguments(
    model: Model,
    kind: str,
    dataset_config: str,
    place: Callable[[Weights], str],
    further: Mapping[str, Setting],
) -> list[str]:
    """Return the arguments of the script that caches `latents` or `text` of a model.

    Args:
        model: model of an architecture that musubi-tuner supports.
        kind: `latents` or `text`.
        dataset_config: path of the dataset TOML.
        place: function that returns the path of weights.
        further: further options of the script.
    """
    script = model.spec.scripts.caching(kind)
    files = {
        file.flag: None if (weights := model.weights(file.key)) is None else place(weights)
        for file in script.files
    }
    dtype = model.text_dtype if kind == "text" else model.vae_dtype
    if dtype is None and model.spec.encodes and kind != "text":
        dtype = model.dtype  # the dtype of our own encoder
    arguments = command_line(
        {
            "--dataset_config": dataset_config,
            **files,
            **({script.dtype_flag: dtype} if script.dtype_flag else {}),
            **{flag: bool(getattr(model, key)) for flag, key in script.switches},
            **further,
        }
    )
    return [*model.version.caching(kind), *arguments, *model.further_arguments(kind)]


MODULES = {"flash_attn": "flash_attn", "flash3": "flash_attn_interface", "xformers": "xformers"}
"""Attention -> package that provides it; torch itself has the others."""
PREFERRED = ("flash_attn", "xformers")  # fastest first; SageAttention has no backward pass
