"""A LoRA of peft in a network, and its files: diffusers', and those in kohya's names."""

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

from latentmake.config.trainers import LoopTrainer
from latentmake.errors import LatentmakeError, TrainingError, first_line
from latentmake.files import cachefile
from latentmake.training.init_lora import Place, misfit, sizes_of, tensor_names

ADAPTER = "default"
"""Name of the LoRA in its network: peft's own."""

_MATRICES = {"lora_A": "lora_down", "lora_B": "lora_up"}  # peft's names, and kohya's
_FAULTS = (
    *(LatentmakeError, OSError, ValueError, TypeError, LookupError, AttributeError),
    *(RuntimeError, SafetensorError),
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
    """Freeze a network and add a float32 LoRA to it, by peft; it changes nothing yet.

    New weights are drawn from torch's global generator.

    Args:
        network: changed in place.
        rank: of the LoRA.
        alpha: the LoRA's output is multiplied by alpha / rank; None for the rank.
        target_modules: layers, by their names or the ends of these.
        autocast: whether the network is called under autocast alone, which casts what layers get:
            peft's own cast to float32 then changes no bit, and takes memory and time.
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
        if parameter.requires_grad:  # the optimizer needs small differences
            parameter.data = parameter.data.float()


def new_adapter(network: Any, trainer: LoopTrainer, dtype: torch.dtype) -> None:
    """Add the LoRA that a trainer's settings name to a network that computes in a dtype."""
    add_adapter(
        network,
        rank=trainer.rank,
        alpha=trainer.alpha,
        target_modules=trainer.target_modules,
        autocast=dtype != torch.float32,
        dropout=trainer.lora_dropout,
    )


def lora_tensors(network: Any) -> dict[str, torch.Tensor]:
    """Return the LoRA's own tensors, not copies, by peft's names."""
    found: dict[str, torch.Tensor] = get_peft_model_state_dict(network)
    return found


def lora_bytes(network: Any, prefix: str) -> bytes:
    """Return the file that a pipeline's `load_lora_weights` reads; the same LoRA, the same bytes.

    Names and metadata (without which a loader takes the rank for alpha) are those of diffusers'
    `LoraBaseMixin._save_lora_weights`.

    `prefix` is the pipeline's name for the network, `unet` or `transformer`.
    """
    tensors, config = lora_tensors(network), network.peft_config[ADAPTER]
    named = {f"{prefix}.{name}": each.detach().cpu().float() for name, each in tensors.items()}
    # What differs from peft's defaults, and no more: another version knows other fields.
    described = {
        f"{prefix}.r": config.r,
        f"{prefix}.lora_alpha": config.lora_alpha,
        f"{prefix}.target_modules": sorted(config.target_modules),
    }
    metadata = {
        "format": "pt",
        LORA_ADAPTER_METADATA_KEY: json.dumps(described, indent=2, sort_keys=True),
    }
    return cachefile.serialize(named, metadata)


def kohya_bytes(
    network: Any,
    place: Callable[[str], str],
    metadata: Mapping[str, str] | None = None,
    *,
    scaled: str = "",
) -> bytes:
    """Return the file in the names of kohya's scripts and those that follow them.

    `place` returns the name there of a layer, of peft's name. The layer `scaled` has no alpha, and
    is scaled by it: readers take the rank for a missing one.
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
    """Put back a LoRA from the file of `lora_bytes`, or one in older names of diffusers.

    A network without a LoRA gets one of its sizes. `strength` is a factor of what it adds to the
    weights. See `lora_bytes` for the prefix.

    Raises:
        TrainingError: it is missing or damaged, or of another network.
    """
    try:
        rank, alpha, layers = sizes_of(file, prefix)
        if ADAPTER not in (getattr(network, "peft_config", None) or {}):
            with torch.random.fork_rng(devices=[]):  # the next noise is the same as without it
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
    """Give a new LoRA the weights of a file, in names of one of `places`; raises TrainingError."""
    try:
        _copy(network, file, places)
    except _FAULTS as error:
        raise misfit(error, file, "trainer") from None


def _copy(network: Any, file: Path, places: Sequence[Place]) -> None:
    """Copy a file's LoRA into the network's; one of another alpha keeps its effect."""
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
    """Return the error of trained weights that cannot be read."""
    what = f"these trained weights cannot be read ({first_line(error)})"
    hint = "delete them and run the same command again, which trains them anew"
    return TrainingError(what, where=file, hint=hint)
