"""Command lines of musubi-tuner's scripts for Wan, as lists of arguments.

Paths come in as the machine that runs the command names them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

from latentmake.config import Model, Weights
from latentmake.config.scripts import File
from latentmake.models.scripted import script_of
from latentmake.models.weight_kinds import weight_file
from latentmake.training.external.arguments import absolute, command_line, located
from latentmake.training.external.musubi.order import MusubiOrder
from latentmake.training.external.result import RunFiles

__all__ = [
    "ATTENTIONS",
    "LATENTS_SCRIPT",
    "TEXT_SCRIPT",
    "TRAINING_SCRIPT",
    "caching_arguments",
    "first_file",
    "latents_arguments",
    "local_arguments",
    "text_arguments",
    "training_arguments",
]

LATENTS_SCRIPT = "wan_cache_latents.py"
TEXT_SCRIPT = "wan_cache_text_encoder_outputs.py"
TRAINING_SCRIPT = "wan_train_network.py"

ATTENTIONS = ("sdpa", "flash_attn", "flash3", "xformers", "sage_attn")

# Where Wan 2.2 goes from its high-noise network to the other, in thousandths.
_BOUNDARY_TEXT, _BOUNDARY_IMAGE = 875, 900


def caching_arguments(
    model: Model,
    kind: str,
    *,
    dataset_config: str,
    place: Callable[[File, Weights], str],
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
        place: returns the path of weights for one of the script's flags.
        batch_size: items encoded at once; None leaves it to the script.
        num_workers: workers that read images; None leaves it to the script.
        skip_existing: pass over items that have a cache file.
        keep_cache: leave cache files alone that belong to no item.
    """
    script, version = script_of(model, kind), model.version
    files: dict[str, str | float | bool | None] = {}
    for file in script.files:
        weights = model.weights(file.key)
        files[file.flag] = None if weights is None else place(file, weights)
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
    own = version.text if kind == "text" else version.latents
    further = model.text_arguments if kind == "text" else model.latents_arguments
    return [*own, *arguments, *further]


def latents_arguments(
    model: Model,
    *,
    dataset_config: str,
    vae: str,
    clip: str | None = None,
    batch_size: int | None = None,
    num_workers: int | None = None,
    skip_existing: bool = True,
    keep_cache: bool = True,
) -> list[str]:
    """Return the arguments of `wan_cache_latents.py`.

    Args:
        model: the run's.
        dataset_config: path of the dataset TOML.
        vae: path of the VAE's file.
        clip: path of the CLIP image encoder's file, for Wan 2.1's image-to-video.
        batch_size: items encoded at once; None leaves it to the script.
        num_workers: processes that read images; None leaves it to the script.
        skip_existing: pass over items that have a cache file.
        keep_cache: leave cache files alone that belong to no item.
    """
    return command_line(
        {
            "--dataset_config": dataset_config,
            "--vae": vae,
            "--vae_dtype": model.vae_dtype or model.dtype,
            "--vae_cache_cpu": model.vae_cache_cpu,
            "--i2v": model.image_to_video,
            "--clip": clip if model.image_to_video else None,
            "--batch_size": batch_size,
            "--num_workers": num_workers,
            "--skip_existing": skip_existing,
            "--keep_cache": keep_cache,
        }
    )


def text_arguments(
    model: Model,
    *,
    dataset_config: str,
    t5: str,
    batch_size: int | None = None,
    num_workers: int | None = None,
    skip_existing: bool = True,
    keep_cache: bool = True,
) -> list[str]:
    """Return the arguments of `wan_cache_text_encoder_outputs.py`; see `latents_arguments`."""
    return command_line(
        {
            "--dataset_config": dataset_config,
            "--t5": t5,
            "--fp8_t5": model.fp8_t5,
            "--batch_size": batch_size,
            "--num_workers": num_workers,
            "--skip_existing": skip_existing,
            "--keep_cache": keep_cache,
        }
    )


def training_arguments(
    order: MusubiOrder,
    *,
    dataset_config: str,
    dit: str,
    dit_high_noise: str | None = None,
    output_dir: str,
    logging_dir: str,
    attention: str,
    resume: str | None = None,
) -> list[str]:
    """Return the arguments of `wan_train_network.py`.

    Args:
        order: the run.
        dataset_config: path of the dataset TOML.
        dit: path of the network; of Wan 2.2's the one for low noise.
        dit_high_noise: path of Wan 2.2's other network.
        output_dir: folder that gets the trained weights, under the run's name.
        logging_dir: folder that gets TensorBoard scalars.
        attention: one of `ATTENTIONS`.
        resume: folder of a state.
    """
    trainer = order.trainer
    boundary = trainer.timestep_boundary
    if boundary is None:
        boundary = _BOUNDARY_IMAGE if order.model.image_to_video else _BOUNDARY_TEXT
    arguments = command_line(
        {
            "--task": order.model.task,
            "--dataset_config": dataset_config,
            "--dit": dit,
            "--dit_high_noise": dit_high_noise,
            "--timestep_boundary": None if dit_high_noise is None else boundary,
            f"--{attention}": True,
            "--mixed_precision": trainer.mixed_precision,
            "--network_module": "networks.lora_wan",
            "--network_dim": trainer.network_dim,
            "--network_alpha": trainer.network_alpha or trainer.network_dim,
            "--learning_rate": trainer.learning_rate,
            # Always given: the documented default is not applied, and the script then fails late.
            "--optimizer_type": trainer.optimizer_type,
            "--max_train_epochs": trainer.max_train_epochs,
            "--gradient_accumulation_steps": trainer.gradient_accumulation_steps,
            "--max_data_loader_n_workers": trainer.max_data_loader_n_workers,
            "--timestep_sampling": trainer.timestep_sampling,
            "--discrete_flow_shift": trainer.discrete_flow_shift,
            "--fp8_base": trainer.fp8_base,
            "--fp8_scaled": trainer.fp8_scaled,
            "--save_every_n_epochs": trainer.save_every_n_epochs,
            "--save_state": trainer.save_every_n_epochs is not None,
            "--output_dir": output_dir,
            "--output_name": order.run,
            "--logging_dir": logging_dir if trainer.logging else None,
            "--resume": resume,
        }
    )
    return [*arguments, *trainer.arguments]


def local_arguments(order: MusubiOrder, *, attention: str, resume: Path | None = None) -> list[str]:
    """Return the arguments of a training on this machine; all paths are absolute."""
    files = RunFiles(order.run, order.output)
    high = order.model.dit_high_noise
    return training_arguments(
        located(order),
        dataset_config=absolute(files.output / "dataset.toml"),
        dit=absolute(first_file(order.model.dit or "")),
        dit_high_noise=None if high is None else absolute(first_file(high)),
        output_dir=absolute(files.work),
        logging_dir=absolute(files.logs),
        attention=attention,
        resume=None if resume is None else absolute(resume),
    )


def first_file(place: str) -> str:
    """Return the file that stands for a network: the first of a folder that is here."""
    with contextlib.suppress(ValueError):
        return str(weight_file(Path(place)))
    return place  # it may lie on another machine
