"""Files of a trained LoRA of Wan's network, for diffusers, musubi-tuner and ComfyUI.

All three hold the same float32 numbers; the LoRA adds alpha / rank * up @ down to a layer's weight.

| file | key of a layer's down matrix | alpha | source |
|---|---|---|---|
| diffusers | `transformer.blocks.0.attn1.to_q.lora_A.weight` | metadata | `WanLoraLoaderMixin` |
| musubi | `lora_unet_blocks_0_self_attn_q.lora_down.weight` | `.alpha` | `networks/lora_wan.py` |
| comfyui | `diffusion_model.blocks.0.self_attn.q.lora_down.weight` | `.alpha` | `comfy/lora.py` |

ComfyUI's `model_lora_keys_unet` maps the name of each layer of a model itself ("generic lora
format"), and its `LoRAAdapter.load` takes `lora_up`, `lora_down` and a scalar `alpha`.
musubi-tuner's `convert_lora.py` reads that file too; so does diffusers, which multiplies alpha into
its matrices.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from diffusers.loaders.lora_base import LORA_ADAPTER_METADATA_KEY
from safetensors import SafetensorError
from safetensors.torch import load_file

from latentmake.errors import LatentmakeError, TrainingError, first_line
from latentmake.files import atomic, cachefile
from latentmake.files.safetensors import read_head
from latentmake.training.lora import ADAPTER, kohya_tensors, layers_of, lora_bytes, lora_tensors
from latentmake.training.wan.dit import original_layer
from latentmake.training.wan.lora_names import lora_names
from latentmake.training.wan.network import Transformer, add_lora

_PREFIX = "transformer"  # in diffusers' pipelines; Wan 2.2's second network has the same
_FAULTS = (
    OSError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    RuntimeError,
    SafetensorError,
)


def write_lora(transformer: Transformer, folder: Path, *, high_noise: bool = False) -> None:
    """Write the LoRA of a network into a folder, as three files; the same LoRA, the same bytes.

    Args:
        transformer: with a LoRA, on any device.
        folder: gets the files of `lora_names`.
        high_noise: whether it is Wan 2.2's network for high noise.
    """
    names = lora_names(high_noise=high_noise)
    alpha = float(transformer.peft_config[ADAPTER].lora_alpha)
    trained = lora_tensors(transformer)
    layers = {layer: original_layer(layer) for layer in layers_of(trained)}
    musubi = {layer: f"lora_unet_{name.replace('.', '_')}" for layer, name in layers.items()}
    comfyui = {layer: f"diffusion_model.{name}" for layer, name in layers.items()}
    folder.mkdir(parents=True, exist_ok=True)
    atomic.write(folder / names.diffusers, lora_bytes(transformer, _PREFIX, trained))
    for name, places in ((names.musubi, musubi), (names.comfyui, comfyui)):
        tensors = kohya_tensors(trained, alpha, places)
        atomic.write(folder / name, cachefile.serialize(tensors, {"format": "pt"}))


def read_lora(transformer: Transformer, folder: Path, *, high_noise: bool = False) -> None:
    """Put back a LoRA that `write_lora` wrote; a network that has none gets one of its sizes.

    `transformer.disable_adapters()` and `enable_adapters()` then turn it off and on.

    Args:
        transformer: changed in place.
        folder: of the files.
        high_noise: as for `write_lora`.

    Raises:
        TrainingError: it is missing or damaged, or of another network.
    """
    file = folder / lora_names(high_noise=high_noise).diffusers
    try:
        described = _described(file)
        state = load_file(file)
        if ADAPTER not in (getattr(transformer, "peft_config", None) or {}):
            _add(transformer, described)
        config = transformer.peft_config[ADAPTER]
        if described["r"] != config.r or described["lora_alpha"] != config.lora_alpha:
            raise ValueError("it has another rank or alpha")
        tensors = lora_tensors(transformer)
        for name in sorted({f"{_PREFIX}.{name}" for name in tensors} ^ state.keys()):
            raise ValueError(f"only one of file and network has {name}")
        with torch.no_grad():
            for name, value in tensors.items():
                value.copy_(state[f"{_PREFIX}.{name}"])
    except _FAULTS as error:
        raise _unreadable(first_line(error), file) from None
    except LatentmakeError as error:
        raise _unreadable(str(error), file) from None


def _described(file: Path) -> dict[str, Any]:
    """Return rank (`r`), `lora_alpha` and `target_modules` of a file."""
    content = json.loads(read_head(file).metadata[LORA_ADAPTER_METADATA_KEY])
    return {name.removeprefix(f"{_PREFIX}."): value for name, value in content.items()}


def _add(transformer: Transformer, described: dict[str, Any]) -> None:
    with torch.random.fork_rng(devices=[]):  # whoever draws noise next draws the same as before
        add_lora(
            transformer,
            rank=described["r"],
            alpha=described["lora_alpha"],
            target_modules=described["target_modules"],
        )


def _unreadable(fault: str, file: Path) -> TrainingError:
    return TrainingError(
        f"this LoRA cannot be read ({fault})",
        where=file,
        hint="delete it and run the same command again, which trains it anew",
    )
