"""LoRA of a network, by peft, and its files in the names of diffusers and of kohya's scripts."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers.loaders.lora_base import LORA_ADAPTER_METADATA_KEY
from peft import LoraConfig
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import get_peft_model_state_dict
from safetensors import SafetensorError
from safetensors.torch import load_file

from latentmake.base.errors import LatentmakeError, TrainingError, first_line
from latentmake.config.trainers import LoopTrainer
from latentmake.formats import cachefile
from latentmake.trainers.init_lora import Place, misfit, sizes_of, tensor_names

ADAPTER = "default"
"""Name of the LoRA in its network; peft's default."""

_MATRICES = {"lora_A": "lora_down", "lora_B": "lora_up"}  # peft's names, and kohya's
_FAULTS = (
    *(LatentmakeError, OSError, ValueError, TypeError, LookupError, AttributeError),
    *(OverflowError, RuntimeError, SafetensorError),
)


def add_adapter(
    network: Any,
    *,
    rank: int,
    target_modules: Sequence[str],
    alpha: float | None = None,
    autocast: bool = False,
    dropout: float = 0.0,
) -> None:
    """Freeze a network and add a float32 LoRA to it, by peft.

    The new LoRA does not change the network's output yet. Its weights are drawn from torch's global
    random generator.

    Args:
        network: network, which is changed in place.
        rank: rank of the LoRA.
        target_modules: layers that get a LoRA, by their names or the ends of their names.
        alpha: scale of the LoRA, whose output is multiplied by alpha / rank; None for the rank.
        autocast: whether the network is only called under autocast, which casts the inputs of
            layers. peft's own cast to float32 is then turned off: it would cost memory and time
            and not change a bit.
        dropout: share of a layer's inputs that its LoRA does not see in training.

    Raises:
        ValueError: peft puts no LoRA on a layer of this kind.
    """
    network.requires_grad_(False)
    network.add_adapter(
        LoraConfig(
            r=rank,
            lora_alpha=rank if alpha is None else alpha,
            lora_dropout=dropout,
            init_lora_weights="gaussian",
            target_modules=list(target_modules),
        )
    )
    if autocast:
        for module in network.modules():
            if isinstance(module, BaseTunerLayer):
                module.cast_input_dtype_enabled = False
    for parameter in network.parameters():
        # A half-precision weight would lose the optimizer's small steps.
        if parameter.requires_grad:
            parameter.data = parameter.data.float()


def new_adapter(network: Any, trainer: LoopTrainer, dtype: torch.dtype) -> None:
    """Add the LoRA that a trainer's settings describe to a network that computes in a dtype."""
    add_adapter(
        network,
        rank=trainer.rank,
        alpha=trainer.alpha,
        target_modules=trainer.target_modules,
        autocast=dtype != torch.float32,
        dropout=trainer.lora_dropout,
    )


lora_tensors: Callable[[Any], dict[str, torch.Tensor]] = get_peft_model_state_dict
"""Function that returns a LoRA's tensors by peft's names; they are no copies."""


def lora_bytes(network: Any, prefix: str, metadata: Mapping[str, str] | None = None) -> bytes:
    """Return the content of a file for a pipeline's `load_lora_weights`.

    The same LoRA gives the same bytes. Names and metadata are as diffusers'
    `LoraBaseMixin._save_lora_weights` writes them. Without the metadata, a loader takes the rank
    for alpha.

    Args:
        network: network with the LoRA.
        prefix: the pipeline's name for the network, `unet` or `transformer`.
        metadata: further metadata of the file.
    """
    tensors, config = lora_tensors(network), network.peft_config[ADAPTER]
    named = {f"{prefix}.{name}": value.detach().cpu().float() for name, value in tensors.items()}
    # Only settings that differ from peft's defaults: other versions of peft have other fields.
    described = {
        f"{prefix}.r": config.r,
        f"{prefix}.lora_alpha": config.lora_alpha,
        f"{prefix}.target_modules": sorted(config.target_modules),
    }
    own = {
        "format": "pt",
        LORA_ADAPTER_METADATA_KEY: json.dumps(described, indent=2, sort_keys=True),
    }
    return cachefile.serialize(named, {**(metadata or {}), **own})


def kohya_bytes(
    network: Any,
    place: Callable[[str], str],
    metadata: Mapping[str, str] | None = None,
    *,
    scaled: str = "",
) -> bytes:
    """Return the content of a file in the names of kohya's scripts.

    Args:
        network: network with the LoRA.
        place: function from peft's name of a layer to its name in the file.
        metadata: further metadata of the file.
        scaled: name of a layer that is written without an alpha. Its weights are multiplied by
            alpha / rank instead, because readers take the rank for a missing alpha.
    """
    config = network.peft_config[ADAPTER]
    alpha = float(config.lora_alpha)
    named: dict[str, torch.Tensor] = {}
    for name, value in lora_tensors(network).items():
        layer, matrix, _ = name.rsplit(".", 2)  # mid_block.attentions.0.proj_in, lora_A, weight
        value = value.detach().cpu().float()
        if layer != scaled:
            named[f"{place(layer)}.alpha"] = torch.tensor(alpha)
        elif matrix == "lora_B":
            value = value * (alpha / config.r)
        named[f"{place(layer)}.{_MATRICES[matrix]}.weight"] = value
    return cachefile.serialize(named, {"format": "pt", **(metadata or {})})


def load_lora(network: Any, file: Path, prefix: str, strength: float = 1.0) -> None:
    """Load a LoRA from a file of `lora_bytes`, or from one in older names of diffusers.

    Args:
        network: network, which gets a LoRA of the file's rank and layers if it has none yet.
        file: file of the LoRA.
        prefix: the pipeline's name for the network, as in `lora_bytes`.
        strength: factor of the LoRA's effect.

    Raises:
        TrainingError: the file is missing or damaged, or belongs to another network.
    """
    try:
        rank, alpha, layers = sizes_of(file, prefix)
        if ADAPTER not in (getattr(network, "peft_config", None) or {}):
            # Drawing the weights must not change the noise that is drawn next.
            with torch.random.fork_rng(devices=[]):
                add_adapter(network, rank=rank, alpha=alpha, target_modules=layers)
        config = network.peft_config[ADAPTER]
        if (rank, alpha) != (config.r, config.lora_alpha):
            raise ValueError("it has another rank or alpha")
        _copy(network, file, [lambda layer: f"{prefix}.{layer}", str])
        for module in network.modules() if strength != 1 else ():
            if isinstance(module, BaseTunerLayer):
                module.set_scale(ADAPTER, strength)
    except _FAULTS as error:
        raise unreadable(error, file) from None


def begin_lora(network: Any, file: Path, places: Sequence[Place]) -> None:
    """Copy a file's weights into a new LoRA; raises TrainingError.

    `places` are functions that name layers, one for each program that may have written the file.
    """
    try:
        _copy(network, file, places)
    except _FAULTS as error:
        raise misfit(error, file, "trainer") from None


def _copy(network: Any, file: Path, places: Sequence[Place]) -> None:
    """Copy a file's LoRA into the network's LoRA.

    If their alphas differ, the weights are scaled, so that the LoRA has the same effect.
    """
    config, tensors = network.peft_config[ADAPTER], lora_tensors(network)
    layers = {name.rsplit(".", 2)[0] for name in tensors}
    names, alpha = tensor_names(file, layers, config.r, places)
    state = load_file(file)
    with torch.no_grad():
        for name, value in tensors.items():
            value.copy_(state[names[name]])
            if ".lora_B." in name:
                own = names.get(f"{name.rsplit('.', 2)[0]}.alpha")
                value *= float(state[own] if own else alpha) / config.lora_alpha


def unreadable(error: Exception, file: Path) -> TrainingError:
    """Return the error for trained weights that cannot be read."""
    what = f"these trained weights cannot be read ({first_line(error)})"
    hint = "delete them and run the same command again, which trains them anew"
    return TrainingError(what, where=file, hint=hint)
