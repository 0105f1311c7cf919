"""The command lines of sd-scripts' training scripts, as lists of arguments.

One place that knows its flags, for the scripts of a publication and for a training here alike.
Nothing is read or written: paths come in as the machine that runs the command names them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from latentmake.models.shapes import T5_LENGTH
from latentmake.training.external.sdscripts.order import SdScriptsOrder

__all__ = [
    "accelerate_arguments",
    "caching_arguments",
    "encoder_places",
    "epochs_of",
    "training_arguments",
]

_NETWORKS = {
    "train_network": "networks.lora",
    "sdxl_train_network": "networks.lora",
    "sd3_train_network": "networks.lora_sd3",
    "flux_train_network": "networks.lora_flux",
}
_EPOCHS = 10  # where neither epochs nor steps are asked for


def _number(value: float) -> str:
    """Return the shortest text that reads as this very number."""
    return str(int(value)) if value == int(value) else repr(value)


def encoder_places(order: SdScriptsOrder) -> dict[str, str]:
    """Return flag -> path of the networks that Flux and SD 3 are given besides their own.

    sd-scripts loads Flux' even where all is cached. What the user names among the trainer's further
    arguments is left out.
    """
    text = [place.path for place in order.model.text]
    found: dict[str, str | None] = {}
    if order.architecture == "flux":
        found = {"--ae": order.model.vae.path, "--clip_l": text[0], "--t5xxl": text[1]}
    elif order.architecture == "sd3":
        found = dict(zip(("--clip_l", "--clip_g", "--t5xxl"), text, strict=True))
    given = set(order.trainer.flags)
    return {flag: path for flag, path in found.items() if path is not None and flag not in given}


def caching_arguments(order: SdScriptsOrder, *, vae: str | None) -> list[str]:
    """Return the arguments for caches made by the training script itself.

    Flux' VAE has a flag of its own among `encoder_places`. What the user names among the trainer's
    further arguments is left out.

    Args:
        order: the run.
        vae: path of the VAE, or its id on the hub.
    """
    model, size = order.model, order.publish.batch_size
    options: dict[str, list[str]] = {}
    if order.architecture != "flux" and vae is not None:
        options["--vae"] = [vae]
    if (model.vae_dtype or model.dtype) == "float32":
        options["--no_half_vae"] = []
    if size is not None:
        options["--vae_batch_size"] = [str(size)]
        if order.architecture in ("sd3", "flux"):
            options["--text_encoder_batch_size"] = [str(size)]
    given = set(order.trainer.flags)
    return [
        word for flag, values in options.items() if flag not in given for word in (flag, *values)
    ]


def training_arguments(
    order: SdScriptsOrder,
    *,
    dataset_config: str,
    checkpoint: str,
    encoders: Mapping[str, str],
    output_dir: str,
    output_name: str,
    logging_dir: str | None = None,
    attention: str | None = None,
    caching: Sequence[str] = (),
    resume: str | None = None,
    initial_step: int | None = None,
) -> list[str]:
    """Return the arguments of a training script, without the script itself.

    Args:
        order: the run.
        dataset_config: path of the dataset TOML.
        checkpoint: path of what is trained.
        encoders: flag -> path; see `encoder_places`.
        output_dir: folder that gets the trained weights.
        output_name: their name, without an ending.
        logging_dir: folder that gets TensorBoard scalars; None writes none.
        attention: that of the machine that trains; by default the trainer's.
        caching: what is said of caches that the script makes itself.
        resume: folder of a state from which to go on.
        initial_step: steps that stand behind it, where the script is to count on from there.
    """
    trainer = order.trainer
    arguments = ["--pretrained_model_name_or_path", checkpoint]
    for flag, path in encoders.items():
        arguments += [flag, path]
    arguments += ["--dataset_config", dataset_config]
    arguments += ["--cache_latents", "--cache_latents_to_disk", *caching]
    arguments += _text(order) + _network(order)
    arguments += [
        *("--learning_rate", _number(trainer.learning_rate)),
        *("--optimizer_type", trainer.optimizer_type),
        *("--lr_scheduler", trainer.lr_scheduler),
        *("--gradient_accumulation_steps", str(trainer.gradient_accumulation_steps)),
        *("--max_data_loader_n_workers", str(trainer.max_data_loader_n_workers)),
        *("--mixed_precision", trainer.mixed_precision),
        *("--seed", str(trainer.seed)),
        f"--{attention or trainer.attention}",
    ]
    if trainer.max_train_steps is not None:
        arguments += ["--max_train_steps", str(trainer.max_train_steps)]
    else:
        arguments += ["--max_train_epochs", str(epochs_of(order))]
    if trainer.gradient_checkpointing:
        arguments.append("--gradient_checkpointing")
    if trainer.torch_compile:
        arguments += ["--torch_compile", "--dynamo_backend", trainer.dynamo_backend or "inductor"]
    if trainer.deepspeed:
        arguments += ["--deepspeed", "--zero_stage", str(trainer.zero_stage)]
    if trainer.save_every_n_epochs is not None:
        arguments += ["--save_every_n_epochs", str(trainer.save_every_n_epochs)]
        # States of a whole network take tens of gigabytes: the last one is enough.
        arguments += ["--save_state", "--save_last_n_epochs_state", "1"]
    arguments += ["--save_model_as", "safetensors"]
    arguments += ["--output_dir", output_dir, "--output_name", output_name]
    if logging_dir is not None:
        arguments += ["--logging_dir", logging_dir]
    if resume is not None:
        arguments += ["--resume", resume]
    if initial_step is not None:
        arguments += ["--initial_step", str(initial_step)]
    return [*arguments, *trainer.arguments]


def epochs_of(order: SdScriptsOrder) -> int | None:
    """Return the epochs of a training; None where steps end it."""
    trainer = order.trainer
    if trainer.max_train_steps is not None:
        return None
    return _EPOCHS if trainer.max_train_epochs is None else trainer.max_train_epochs


def _text(order: SdScriptsOrder) -> list[str]:
    """Return what is said of captions: that they are cached, or how they are encoded."""
    model, arguments = order.model, list[str]()
    if order.architecture == "sd2":
        arguments.append("--v2")
    if order.architecture in ("sd1", "sd2", "sdxl") and model.max_token_length != 75:
        arguments += ["--max_token_length", str(model.max_token_length)]
    if not order.cached_text:
        skip = [] if model.clip_skip is None else ["--clip_skip", str(model.clip_skip)]
        return arguments + skip
    arguments += ["--cache_text_encoder_outputs", "--cache_text_encoder_outputs_to_disk"]
    if order.architecture in ("sd3", "flux"):
        length = model.text[-1].max_length or T5_LENGTH
        arguments += ["--t5xxl_max_token_length", str(length)]
    if model.apply_lg_attn_mask:
        arguments.append("--apply_lg_attn_mask")
    if model.apply_t5_attn_mask:
        arguments.append("--apply_t5_attn_mask")
    return arguments


def _network(order: SdScriptsOrder) -> list[str]:
    """Return what is said of the LoRA, where one is trained."""
    trainer = order.trainer
    if order.script not in _NETWORKS:
        return []
    alpha = trainer.network_dim if trainer.network_alpha is None else trainer.network_alpha
    arguments = [
        *("--network_module", _NETWORKS[order.script]),
        *("--network_dim", str(trainer.network_dim)),
        *("--network_alpha", _number(alpha)),
    ]
    if order.cached_text or trainer.network_train_unet_only:
        arguments.append("--network_train_unet_only")
    return arguments


def accelerate_arguments(
    order: SdScriptsOrder, *, processes: int | None = None, config: str | None = None
) -> list[str]:
    """Return what stands between `accelerate launch` and the training's script.

    Args:
        order: the run.
        processes: how many devices train together; None leaves it to accelerate.
        config: path of accelerate's configuration file, which then says the precision too.
    """
    if config is not None:
        return ["--config_file", config]
    options = ["--mixed_precision", order.trainer.mixed_precision]
    if processes is not None:
        options += ["--num_processes", str(processes), "--num_machines", "1"]
        options += ["--dynamo_backend", "no"]
        options += ["--multi_gpu"] if processes > 1 else []
    return options
