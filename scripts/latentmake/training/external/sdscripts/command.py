"""Command lines of sd-scripts' training scripts, as lists of arguments, and what they start from.

Paths come in as the machine that runs the command names them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from latentmake.config import weights
from latentmake.config.external_trainers import flags_of
from latentmake.models.checks import ModelFile
from latentmake.models.files import T5_LENGTH
from latentmake.models.headers import lack
from latentmake.training.external.order import Resume, absolute, command_line, located
from latentmake.training.external.sdscripts.order import SdScriptsOrder
from latentmake.training.order import RunFiles


def encoder_places(order: SdScriptsOrder) -> dict[str, str]:
    """Return flag -> path of the weights that a script is given besides its network.

    Some scripts load them even with caches. Flags among the user's own arguments are left out.
    """
    given = flags_of(order.trainer.arguments)
    places = {file.flag: order.model.weights(file.key) for file in order.strategies.files}
    return {
        flag: place.path
        for flag, place in places.items()
        if place is not None and place.path is not None and flag not in given
    }


def caching_arguments(order: SdScriptsOrder, *, vae: str | None) -> list[str]:
    """Return the arguments for caches made by the training script itself.

    A VAE with a flag of its own is among `encoder_places`. Flags among the user's own arguments are
    left out.
    """
    model, size, strategies = order.model, order.publish.batch_size, order.strategies
    options = {
        "--vae": None if "vae" in (file.key for file in strategies.files) else vae,
        "--no_half_vae": (model.vae_dtype or model.dtype) == "float32",
        "--vae_batch_size": size,
        "--text_encoder_batch_size": size if strategies.batches_text else None,
    }
    given = flags_of(order.trainer.arguments)
    return command_line({flag: value for flag, value in options.items() if flag not in given})


def training_arguments(
    order: SdScriptsOrder,
    *,
    dataset_config: str,
    checkpoint: str,
    encoders: Mapping[str, str],
    output_dir: str,
    logging_dir: str,
    attention: str | None = None,
    caching: Sequence[str] = (),
    resume: str | None = None,
    initial_step: int | None = None,
) -> list[str]:
    """Return the arguments of a training script.

    Args:
        order: the run.
        dataset_config: path of the dataset TOML.
        checkpoint: path of the trained network.
        encoders: see `encoder_places`.
        output_dir: folder of the trained weights.
        logging_dir: folder of TensorBoard's files.
        attention: that of the machine that trains; by default the trainer's.
        caching: see `caching_arguments`.
        resume: folder of a state.
        initial_step: steps done before it, where the script is to count on from there.
    """
    trainer = order.trainer
    saves = trainer.save_every_n_epochs is not None
    arguments = command_line(
        {
            "--pretrained_model_name_or_path": checkpoint,
            **encoders,
            "--dataset_config": dataset_config,
            "--cache_latents": True,
            "--cache_latents_to_disk": True,
        }
    )
    arguments += [*order.model.latents_arguments, *caching]
    arguments += command_line(
        {
            **_text(order),
            **_network(order),
            "--learning_rate": trainer.learning_rate,
            "--optimizer_type": trainer.optimizer_type,
            "--lr_scheduler": trainer.lr_scheduler,
            "--gradient_accumulation_steps": trainer.gradient_accumulation_steps,
            "--max_data_loader_n_workers": trainer.max_data_loader_n_workers,
            "--mixed_precision": trainer.mixed_precision,
            "--seed": trainer.seed,
            f"--{attention or trainer.attention}": True,
            "--max_train_steps": trainer.max_train_steps,
            "--max_train_epochs": order.epochs,
            "--gradient_checkpointing": trainer.gradient_checkpointing,
            "--torch_compile": trainer.torch_compile,
            "--dynamo_backend": (trainer.dynamo_backend or "inductor")
            if trainer.torch_compile
            else None,
            "--deepspeed": trainer.deepspeed,
            "--zero_stage": trainer.zero_stage if trainer.deepspeed else None,
            "--save_every_n_epochs": trainer.save_every_n_epochs,
            "--save_state": saves,
            # States of a complete network take tens of gigabytes: the last one is enough.
            "--save_last_n_epochs_state": 1 if saves else None,
            "--save_model_as": "safetensors",
            "--output_dir": output_dir,
            "--output_name": order.run,
            "--logging_dir": logging_dir if trainer.logging else None,
            "--resume": resume,
            "--initial_step": initial_step,
            **order.flags,
        }
    )
    return [*arguments, *order.model.text_arguments, *trainer.arguments]


def _text(order: SdScriptsOrder) -> dict[str, str | float | bool | None]:
    """Return the options about captions: cached, or encoded by the script."""
    model, spec = order.model, order.model.spec
    has_t5 = "T5" in spec.text_encoders
    options: dict[str, str | float | bool | None] = dict.fromkeys(order.strategies.switches, True)
    if spec.chunks_captions and model.max_token_length != 75:
        options["--max_token_length"] = model.max_token_length
    if not order.cached_text:
        return options | {"--clip_skip": model.clip_skip}
    return options | {
        "--cache_text_encoder_outputs": True,
        "--cache_text_encoder_outputs_to_disk": True,
        "--t5xxl_max_token_length": model.text[-1].max_length or T5_LENGTH if has_t5 else None,
        "--apply_lg_attn_mask": model.apply_lg_attn_mask,
        "--apply_t5_attn_mask": model.apply_t5_attn_mask,
    }


def _network(order: SdScriptsOrder) -> dict[str, str | float | bool | None]:
    """Return the options of the LoRA, where one is trained."""
    trainer = order.trainer
    if order.script in order.strategies.complete:
        return {}
    return {
        "--network_module": order.strategies.network,
        "--network_dim": trainer.network_dim,
        "--network_alpha": trainer.network_alpha or trainer.network_dim,
        "--network_train_unet_only": order.cached_text or trainer.network_train_unet_only,
    }


def local_arguments(order: SdScriptsOrder, resume: Resume | None = None) -> list[str]:
    """Return the arguments of a training on this machine; all paths are absolute."""
    files, resume = RunFiles(order), resume or Resume()
    return training_arguments(
        located(order.left(resume)),
        dataset_config=absolute(files.output / "sdscripts" / f"{order.run}.toml"),
        checkpoint=absolute(order.model.checkpoint or ""),
        encoders={
            flag: absolute(path)
            for flag, path in encoder_places(order).items()
            if Path(path).is_file() or flag in order.strategies.folders
        },
        output_dir=absolute(files.work),
        logging_dir=absolute(files.logs),
        resume=None if resume.state is None else absolute(resume.state),
        initial_step=resume.done * resume.steps if resume.state and resume.counted else None,
    )


# -- files ----------------------------------------------------------------------------------------


def model_files(order: SdScriptsOrder) -> Iterator[ModelFile]:
    """Yield the checkpoint, inspected, and the encoders that a script cannot be given."""
    yield ModelFile("checkpoint", order.model.checkpoint or "", fault=_checkpoint_fault(order))
    keys = {file.flag: file.key for file in order.strategies.files}
    for flag, path in encoder_places(order).items() if order.strategies.insists else ():
        place = Path(path)
        if not (place.is_file() or (flag in order.strategies.folders and place.is_dir())):
            fault = f"is no file: name one, or add [{flag}, FILE] to the trainer's `arguments`"
            yield ModelFile(keys[flag], path, fault=fault)


def _checkpoint_fault(order: SdScriptsOrder) -> str:
    place, title = Path(order.model.checkpoint or ""), order.architecture
    if not place.exists():
        return weights.absence(place)
    if not (place.is_file() or place.is_dir()):
        return "is no regular file"
    if place.is_dir() and order.model.spec.single_file:
        hint = "name the .safetensors file of the original release"
        return f"is a folder, and sd-scripts reads {title} from one file: {hint}"
    if place.suffix != ".safetensors":
        return ""
    return lack(place, order.strategies.marks, f"network of {title}")
