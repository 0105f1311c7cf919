"""The command lines of musubi-tuner's scripts for Wan, as lists of arguments.

One place that knows its flags, for the scripts of a publication and for a training here alike.
Nothing is read or written: paths come in as the machine that runs the command names them.
"""

from __future__ import annotations

from latentmake.config import Model
from latentmake.training.external.musubi.order import MusubiOrder

__all__ = [
    "ATTENTIONS",
    "LATENTS_SCRIPT",
    "TEXT_SCRIPT",
    "TRAINING_SCRIPT",
    "accelerate_arguments",
    "latents_arguments",
    "text_arguments",
    "training_arguments",
]

LATENTS_SCRIPT = "wan_cache_latents.py"
TEXT_SCRIPT = "wan_cache_text_encoder_outputs.py"
TRAINING_SCRIPT = "wan_train_network.py"

ATTENTIONS = ("sdpa", "flash_attn", "flash3", "xformers", "sage_attn")

# Where Wan 2.2 goes from its high-noise network to the other, in thousandths.
_BOUNDARY_TEXT, _BOUNDARY_IMAGE = 875, 900


def _number(value: float) -> str:
    """Return the shortest text that reads as this very number."""
    return str(int(value)) if value == int(value) else repr(value)


def _caching(
    batch_size: int | None,
    num_workers: int | None,
    skip_existing: bool,
    keep_cache: bool,
) -> list[str]:
    arguments: list[str] = []
    if batch_size is not None:
        arguments += ["--batch_size", str(batch_size)]
    if num_workers is not None:
        arguments += ["--num_workers", str(num_workers)]
    if skip_existing:
        arguments.append("--skip_existing")
    if keep_cache:
        arguments.append("--keep_cache")
    return arguments


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
    """Return the arguments of `wan_cache_latents.py`, without the script itself.

    Args:
        model: the run's.
        dataset_config: path of the dataset TOML.
        vae: path of the VAE's file.
        clip: path of the CLIP image encoder's file, for Wan 2.1's image-to-video.
        batch_size: items encoded at once; None leaves it to the script, as the next does.
        num_workers: processes that read images.
        skip_existing: pass over what has a cache file.
        keep_cache: leave cache files alone that belong to no item.
    """
    arguments = ["--dataset_config", dataset_config, "--vae", vae]
    arguments += ["--vae_dtype", model.vae_dtype or model.dtype]
    if model.vae_cache_cpu:
        arguments.append("--vae_cache_cpu")
    if model.image_to_video:
        arguments.append("--i2v")
        if clip is not None:
            arguments += ["--clip", clip]
    return arguments + _caching(batch_size, num_workers, skip_existing, keep_cache)


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
    """Return the arguments of `wan_cache_text_encoder_outputs.py`, without the script itself.

    Args:
        model: the run's.
        dataset_config: path of the dataset TOML.
        t5: path of umT5's file.
        batch_size: captions encoded at once; None leaves it to the script, as the next does.
        num_workers: processes that read captions.
        skip_existing: pass over what has a cache file.
        keep_cache: leave cache files alone that belong to no item.
    """
    arguments = ["--dataset_config", dataset_config, "--t5", t5]
    if model.fp8_t5:
        arguments.append("--fp8_t5")
    return arguments + _caching(batch_size, num_workers, skip_existing, keep_cache)


def training_arguments(
    order: MusubiOrder,
    *,
    dataset_config: str,
    dit: str,
    dit_high_noise: str | None = None,
    output_dir: str,
    output_name: str,
    logging_dir: str | None = None,
    attention: str,
    resume: str | None = None,
) -> list[str]:
    """Return the arguments of `wan_train_network.py`, without the script itself.

    Args:
        order: the run.
        dataset_config: path of the dataset TOML.
        dit: path of the network; of Wan 2.2's the one for low noise.
        dit_high_noise: path of Wan 2.2's other network.
        output_dir: folder that gets the trained weights.
        output_name: their name, without an ending.
        logging_dir: folder that gets TensorBoard scalars; None writes none.
        attention: one of `ATTENTIONS`.
        resume: folder of a state from which to go on.

    Raises:
        ValueError: there is no such attention.
    """
    if attention not in ATTENTIONS:
        raise ValueError(f"attention {attention!r} is none of {', '.join(ATTENTIONS)}")
    trainer = order.trainer
    task = str(order.model.task)
    arguments = ["--task", task, "--dataset_config", dataset_config, "--dit", dit]
    if dit_high_noise is not None:
        boundary = trainer.timestep_boundary
        if boundary is None:
            boundary = _BOUNDARY_IMAGE if order.model.image_to_video else _BOUNDARY_TEXT
        arguments += ["--dit_high_noise", dit_high_noise, "--timestep_boundary", str(boundary)]
    alpha = trainer.network_dim if trainer.network_alpha is None else trainer.network_alpha
    arguments += [
        f"--{attention}",
        *("--mixed_precision", trainer.mixed_precision),
        *("--network_module", "networks.lora_wan"),
        *("--network_dim", str(trainer.network_dim)),
        *("--network_alpha", _number(alpha)),
        *("--learning_rate", _number(trainer.learning_rate)),
        # Always given: the documented default is not applied, and the script then fails late.
        *("--optimizer_type", trainer.optimizer_type),
        *("--max_train_epochs", str(trainer.max_train_epochs)),
        *("--gradient_accumulation_steps", str(trainer.gradient_accumulation_steps)),
        *("--max_data_loader_n_workers", str(trainer.max_data_loader_n_workers)),
    ]
    if trainer.timestep_sampling is not None:
        arguments += ["--timestep_sampling", trainer.timestep_sampling]
    if trainer.discrete_flow_shift is not None:
        arguments += ["--discrete_flow_shift", _number(trainer.discrete_flow_shift)]
    if trainer.fp8_base:
        arguments.append("--fp8_base")
        if trainer.fp8_scaled:
            arguments.append("--fp8_scaled")
    if trainer.save_every_n_epochs is not None:
        arguments += ["--save_every_n_epochs", str(trainer.save_every_n_epochs), "--save_state"]
    arguments += ["--output_dir", output_dir, "--output_name", output_name]
    if logging_dir is not None:
        arguments += ["--logging_dir", logging_dir]
    if resume is not None:
        arguments += ["--resume", resume]
    return [*arguments, *trainer.arguments]


def accelerate_arguments(order: MusubiOrder, *, config: str | None = None) -> list[str]:
    """Return what stands between `accelerate launch` and the training's script.

    Args:
        order: the run.
        config: path of accelerate's configuration file, which then says the precision too.
    """
    if config is not None:
        return ["--config_file", config]
    return ["--mixed_precision", order.trainer.mixed_precision]
