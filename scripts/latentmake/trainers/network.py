"""The network that is trained: loaded, checked against the caches, adapted, and written out."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, TypeAlias

import torch
from diffusers import UNet2DConditionModel
from diffusers.loaders.lora_base import LORA_ADAPTER_METADATA_KEY
from diffusers.loaders.single_file_utils import SingleFileComponentError
from diffusers.utils import convert_state_dict_to_diffusers
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict
from safetensors import SafetensorError

from latentmake import cachefile
from latentmake.config import SdTrainer, Weights
from latentmake.errors import ModelError, TrainingError
from latentmake.recipe import config_file, weights_files
from latentmake.trainers.record import Layout
from latentmake.trainers.storage import WRITE_FAULTS, open_to_group, write_fault

__all__ = ["UNet", "adapt", "check", "load_trained", "load_unet", "trained_state", "write_trained"]

UNet: TypeAlias = Any  # a UNet2DConditionModel: diffusers and peft have no types
_UNet: UNet = UNet2DConditionModel
_convert: Any = convert_state_dict_to_diffusers
_ONLY = "the sd trainer trains the UNets of Stable Diffusion 1.x and 2.x"
_FAULTS = (
    OSError,
    ValueError,
    RuntimeError,
    KeyError,
    NotImplementedError,
    SafetensorError,
    SingleFileComponentError,
)


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__


def load_unet(weights: Weights) -> UNet:
    """Load a UNet in float32 on the CPU: a diffusers folder, a single file, or from the hub.

    Raises:
        ModelError: it is missing, incomplete, or no UNet of Stable Diffusion 1.x or 2.x.
    """
    where = weights.path or f"{weights.hub}@{weights.revision}"
    try:
        if weights.path is None:
            unet, info = _UNet.from_pretrained(
                weights.hub,
                revision=weights.revision,
                subfolder=weights.subfolder,
                torch_dtype=torch.float32,
                output_loading_info=True,
            )
            missing = list(info["missing_keys"])
        elif Path(weights.path).is_file():
            unet = _single_file(weights)
            missing = [name for name, each in unet.named_parameters() if each.is_meta]
        else:
            weights_files(weights)
            _check_config(Path(weights.path) / "config.json")
            unet, info = _UNet.from_pretrained(
                weights.path,
                local_files_only=True,
                torch_dtype=torch.float32,
                output_loading_info=True,
            )
            missing = list(info["missing_keys"])
    except _FAULTS as error:
        raise ModelError(
            f"the UNet cannot be loaded ({_first_line(error)})",
            where=where,
            mend="name the folder of a diffusers UNet, or copy it again",
        ) from None
    if missing:
        raise ModelError(
            f"the UNet's weights are incomplete: {missing[0]} and {len(missing) - 1} others are "
            "missing",
            where=where,
            mend="copy the model again",
        )
    if unet.config.addition_embed_type is not None or unet.config.class_embed_type is not None:
        raise ModelError("this UNet needs more conditions than text", where=where, mend=_ONLY)
    return unet


def _single_file(weights: Weights) -> UNet:
    config = config_file(weights)
    if config is None:
        raise ModelError(
            "a single file needs the configuration that describes it",
            where=weights.path or "",
            mend="set the UNet's `config` to a folder with its config.json",
        )
    _check_config(config)
    return _UNet.from_single_file(
        weights.path, config=str(config.parent), local_files_only=True, torch_dtype=torch.float32
    )


def _check_config(path: Path) -> None:
    try:
        kind = json.loads(path.read_bytes()).get("_class_name", "UNet2DConditionModel")
    except (OSError, ValueError, AttributeError):
        raise ModelError("is no configuration", where=path, mend="copy the model again") from None
    if kind != "UNet2DConditionModel":
        raise ModelError(f"is the configuration of a {kind}", where=path, mend=_ONLY)


def check(unet: UNet, *, channels: int, text_width: int, where: str) -> None:
    """Check that a UNet fits the caches.

    Raises:
        ModelError: it takes latents or embeddings of another width.
    """
    mend = "`unet`, `vae` and `text` of the model must belong together"
    if unet.config.in_channels != channels or unet.config.out_channels != channels:
        sides = f"{unet.config.in_channels} channels and gives {unet.config.out_channels}"
        raise ModelError(
            f"the UNet takes {sides}, but the latents have {channels}", where=where, mend=mend
        )
    width = unet.config.cross_attention_dim
    if any(each != text_width for each in ([width] if isinstance(width, int) else width)):
        raise ModelError(
            f"the UNet takes embeddings {width} wide, but the captions' are {text_width} wide",
            where=where,
            mend=mend,
        )


def adapt(unet: UNet, trainer: SdTrainer, frozen: torch.dtype) -> None:
    """Choose what is trained: a new LoRA over frozen weights, or all weights.

    The new LoRA changes nothing yet, and is drawn from torch's global generator.

    Args:
        unet: float32; changed in place.
        trainer: the settings.
        frozen: number format of the weights that are not trained.

    Raises:
        TrainingError: a name in `target_modules` fits no layer.
    """
    if trainer.gradient_checkpointing:
        unet.enable_gradient_checkpointing()
    if trainer.adapter == "full":
        unet.requires_grad_(True)
        return
    names = [name for name, _ in unet.named_modules()]
    for target in trainer.target_modules:
        if not any(name == target or name.endswith("." + target) for name in names):
            raise TrainingError(
                f"no layer of the UNet is named `{target}`",
                where="trainer.target_modules",
                mend="the usual ones are to_q, to_k, to_v, to_out.0",
            )
    unet.requires_grad_(False)
    if frozen != torch.float32:
        unet.to(dtype=frozen)
    alpha = trainer.rank if trainer.alpha is None else trainer.alpha
    try:
        unet.add_adapter(
            LoraConfig(
                r=trainer.rank,
                lora_alpha=alpha,
                init_lora_weights="gaussian",
                target_modules=trainer.target_modules,
            )
        )
    except ValueError as error:
        raise TrainingError(
            f"a LoRA cannot be put there ({_first_line(error)})",
            where="trainer.target_modules",
            mend="name linear or convolution layers",
        ) from None
    for parameter in unet.parameters():
        if parameter.requires_grad:  # the optimiser needs small differences
            parameter.data = parameter.data.float()


def trained_state(unet: UNet) -> dict[str, torch.Tensor]:
    """Return the weights that are trained, by the name of their parameter, on the CPU."""
    return {
        name: parameter.detach().cpu().contiguous()
        for name, parameter in unet.named_parameters()
        if parameter.requires_grad
    }


def load_trained(unet: UNet, state: dict[str, torch.Tensor]) -> None:
    """Put back what `trained_state` returned.

    Raises:
        ValueError: it belongs to another network.
    """
    parameters = {name: each for name, each in unet.named_parameters() if each.requires_grad}
    if parameters.keys() != state.keys():
        raise ValueError("weights of another network")
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(state[name])


def _lora_bytes(unet: UNet) -> bytes:
    """Return the file that `StableDiffusionPipeline.load_lora_weights` reads.

    Names and metadata (without which a loader takes the rank for alpha) are those of diffusers'
    `StableDiffusionLoraLoaderMixin.save_lora_weights`.
    """
    state = _convert(get_peft_model_state_dict(unet))
    tensors = {f"unet.{name}": value.detach().cpu().float() for name, value in state.items()}
    config = unet.peft_config["default"]
    # What differs from peft's defaults, and no more: another version knows other fields.
    described = {
        "unet.r": config.r,
        "unet.lora_alpha": config.lora_alpha,
        "unet.target_modules": sorted(config.target_modules),
    }
    metadata = {
        "format": "pt",
        LORA_ADAPTER_METADATA_KEY: json.dumps(described, indent=2, sort_keys=True),
    }
    return cachefile.serialize(tensors, metadata)


def write_trained(unet: UNet, layout: Layout, *, full: bool) -> None:
    """Write the trained weights; an older result stays until the new one is complete.

    The record of the older one goes first and its sample pictures go too, so that neither ever
    stands beside weights of another training.

    Raises:
        StorageError: the disk is full or cannot be written.
    """
    if not full:
        data = _lora_bytes(unet)
        layout.record.unlink(missing_ok=True)
        cachefile.write(layout.lora, data)
        layout.grid.unlink(missing_ok=True)
        shutil.rmtree(layout.unet, ignore_errors=True)
        return
    new = layout.output / f".unet-new{cachefile.TEMPORARY_SUFFIX}"
    old = layout.output / f".unet-old{cachefile.TEMPORARY_SUFFIX}"
    try:
        for folder in (new, old):
            shutil.rmtree(folder, ignore_errors=True)
        unet.save_pretrained(new, safe_serialization=True, max_shard_size="1TB")
        open_to_group(new)
        layout.record.unlink(missing_ok=True)
        if layout.unet.is_dir():
            layout.unet.rename(old)
        new.rename(layout.unet)
        shutil.rmtree(old, ignore_errors=True)
        layout.grid.unlink(missing_ok=True)
        layout.lora.unlink(missing_ok=True)
    except WRITE_FAULTS as error:
        shutil.rmtree(new, ignore_errors=True)
        raise write_fault(error, layout.output) or error from None
