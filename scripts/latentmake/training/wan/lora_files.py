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

from pathlib import Path
from typing import Any

from latentmake.files import atomic
from latentmake.training.lora import kohya_bytes, load_lora, lora_bytes
from latentmake.training.wan.dit import PREFIX, comfyui_place, lora_names, musubi_place
from latentmake.training.wan.network import add_lora


def write_lora(transformer: Any, folder: Path, *, high_noise: bool = False) -> None:
    """Write the LoRA of a network into a folder, as three files; the same LoRA, the same bytes.

    Args:
        transformer: with a LoRA, on any device.
        folder: gets the files of `lora_names`.
        high_noise: whether it is Wan 2.2's network for high noise.
    """
    names = lora_names(high_noise=high_noise)
    atomic.write(folder / names.diffusers, lora_bytes(transformer, PREFIX))
    atomic.write(folder / names.musubi, kohya_bytes(transformer, musubi_place))
    atomic.write(folder / names.comfyui, kohya_bytes(transformer, comfyui_place))


def read_lora(transformer: Any, folder: Path, *, high_noise: bool = False) -> None:
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
    load_lora(transformer, file, PREFIX, add_lora)
