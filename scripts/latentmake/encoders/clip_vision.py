"""The CLIP image encoder that Wan 2.1's image-to-video looks at its first frame through.

open-clip's xlm-roberta-large ViT-huge-14, of which the image half counts: from a transformers
folder, or from the one file of the original release
(models_clip_open-clip-xlm-roberta-large-vit-huge-14.pth, or .safetensors of the same names).
"""

from __future__ import annotations

import math
import re
from typing import Any

import torch
from transformers import CLIPVisionConfig, CLIPVisionModel

from latentmake.config import Weights
from latentmake.encoders.state import (
    LOAD_FAULTS,
    State,
    build,
    fill,
    is_config_of,
    kind_of,
    local_config,
    local_state,
    refusal,
)
from latentmake.errors import ModelError

__all__ = ["ClipVision", "load_clip_vision"]

# Of each colour channel of CLIP's training images (source: openai/CLIP, clip.py).
_MEAN = (0.48145466, 0.4578275, 0.40821073)
_STD = (0.26862954, 0.26130258, 0.27577711)
_HEAD_SIZE = 80  # of ViT-huge; no shape tells it
_MEND = (
    "set `clip` to models_clip_open-clip-xlm-roberta-large-vit-huge-14.pth or its .safetensors, "
    "or to the `image_encoder` folder of a Wan pipeline"
)
# Names inside a block: the original's, then transformers'.
_BLOCK = {
    "norm1": "layer_norm1",
    "attn.proj": "self_attn.out_proj",
    "norm2": "layer_norm2",
    "mlp.0": "mlp.fc1",
    "mlp.2": "mlp.fc2",
}
_OUTSIDE = {
    "cls_embedding": "embeddings.class_embedding",
    "pos_embedding": "embeddings.position_embedding.weight",
    "patch_embedding.weight": "embeddings.patch_embedding.weight",
    "pre_norm.weight": "pre_layrnorm.weight",
    "pre_norm.bias": "pre_layrnorm.bias",
    "post_norm.weight": "post_layernorm.weight",
    "post_norm.bias": "post_layernorm.bias",
}
# What belongs to CLIP, but not to the hidden states of its image encoder.
_FOREIGN = re.compile(
    r"textual\.|visual\.head$|log_scale$|text_model\.|(text|visual)_projection\.|logit_scale$"
    r"|(.+\.)?position_ids$"
)


class ClipVision:
    """The image encoder of CLIP without its last block.

    Args:
        network: transformers' network, on its device and in its format, with all blocks.
    """

    def __init__(self, network: CLIPVisionModel) -> None:
        # Wan looks at what the last block but one gives, so that the last has nothing to do.
        network.encoder.layers = network.encoder.layers[:-1]
        self._network = network

    @torch.inference_mode()
    def encode(
        self, frames: torch.Tensor, pixel_dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        """Encode the first frames of clips.

        Args:
            frames: [N, H, W, 3], 0 to 255, uint8, on any device; of any size: it is squeezed to
                the network's square, as Wan does.
            pixel_dtype: the format in which pixels are scaled and resized; musubi-tuner uses that
                of the latents.

        Returns:
            [N, 257, 1280] (one token for the class, then one a patch), float16, on the CPU.
        """
        network = self._network
        signal = frames.to(network.device).permute(0, 3, 1, 2).to(pixel_dtype) / 127.5 - 1.0
        side = network.config.image_size
        signal = torch.nn.functional.interpolate(
            signal, size=(side, side), mode="bicubic", align_corners=False
        )
        mean, deviation = (
            torch.tensor(each, dtype=pixel_dtype, device=signal.device)[:, None, None]
            for each in (_MEAN, _STD)
        )
        signal = (signal * 0.5 + 0.5 - mean) / deviation
        with torch.autocast(signal.device.type, enabled=False):
            hidden = network(signal.to(network.dtype)).last_hidden_state
        found: torch.Tensor = hidden.to(torch.float16).cpu()
        return found


def load_clip_vision(weights: Weights, device: torch.device, dtype: torch.dtype) -> ClipVision:
    """Load the CLIP image encoder for inference.

    Args:
        weights: a transformers folder of a CLIP image encoder or of a whole CLIP, a single file in
            the original's names or transformers', or a hub id.
        device: where it shall run.
        dtype: in what it shall compute; Wan uses float16, and a CPU float32.

    Raises:
        ModelError: it is missing, incomplete, or another kind of network.
    """
    where = weights.path or weights.hub or ""
    try:
        network = _from_disk(weights, where) if weights.hub is None else _from_hub(weights, dtype)
    except LOAD_FAULTS as error:
        raise refusal(error, weights, "a CLIP image encoder", _MEND) from None
    return ClipVision(network.to(device=device, dtype=dtype).eval().requires_grad_(False))


def _from_hub(weights: Weights, dtype: torch.dtype) -> CLIPVisionModel:
    network, info = CLIPVisionModel.from_pretrained(
        weights.hub,
        revision=weights.revision,
        subfolder=weights.subfolder or "",
        dtype=dtype,
        output_loading_info=True,
    )
    unknown = [name for name in info["unexpected_keys"] if not _FOREIGN.match(name)]
    if faults := list(info["missing_keys"]) + unknown:
        raise ValueError(f"{faults[0]} and {len(faults) - 1} more are missing or unknown")
    return network


def _from_disk(weights: Weights, where: str) -> CLIPVisionModel:
    config = local_config(weights)
    if config is not None and not is_config_of(config, ["clip_vision_model", "clip"]):
        own = config.get("model_type") or config.get("_class_name")
        raise ModelError(f"is {own}, not clip_vision_model", where=where, mend=_MEND)
    state = local_state(weights)
    if (kind := kind_of(state)) != "a CLIP image encoder":
        raise ModelError(f"is {kind}, not a CLIP image encoder", where=where, mend=_MEND)
    state = _converted(state)
    settings = _inferred(state, where) if config is None else config.get("vision_config", config)
    network = build(lambda: CLIPVisionModel(CLIPVisionConfig.from_dict(settings)), where=where)
    fill(network, state, kind="CLIP image encoder", where=where, mend=_MEND)
    positions = network.embeddings.num_positions
    network.embeddings.position_ids = torch.arange(positions)[None]  # in no file
    return network


def _converted(state: State) -> State:
    """Return weights by transformers' names, without what is not the image encoder's."""
    state = {name: value for name, value in state.items() if not _FOREIGN.match(name)}
    if not any(name.startswith("visual.") for name in state):
        return {name.removeprefix("vision_model."): value for name, value in state.items()}
    found: State = {}
    for name, value in state.items():
        short = name.removeprefix("visual.")
        if match := re.fullmatch(r"transformer\.(\d+)\.(.+)\.(weight|bias)", short):
            layer = f"encoder.layers.{match[1]}"
            if match[2] == "attn.to_qkv":
                for letter, part in zip("qkv", value.chunk(3), strict=True):
                    found[f"{layer}.self_attn.{letter}_proj.{match[3]}"] = part
            else:
                found[f"{layer}.{_BLOCK.get(match[2], match[2])}.{match[3]}"] = value
        else:
            found[_OUTSIDE.get(short, name)] = value
    # The original has them with axes of length 1 for the batch, and for the one class token.
    for name, axes in (("class_embedding", 2), ("position_embedding.weight", 1)):
        if (embedding := found.get(f"embeddings.{name}")) is not None:
            found[f"embeddings.{name}"] = embedding.reshape(embedding.shape[axes:])
    return found


def _inferred(state: State, where: str) -> dict[str, Any]:
    """Read the settings off the shapes of the weights, taking it for a ViT-huge otherwise."""
    width, _, patch, _ = state["embeddings.patch_embedding.weight"].shape
    if width % _HEAD_SIZE:
        raise ModelError(
            f"is a CLIP image encoder of width {width}, which is no ViT-huge",
            where=where,
            mend=_MEND,
        )
    tokens = state["embeddings.position_embedding.weight"].shape[0]
    layers = [re.match(r"encoder\.layers\.(\d+)\.", name) for name in state]
    return {
        "hidden_size": width,
        "intermediate_size": state["encoder.layers.0.mlp.fc1.weight"].shape[0],
        "num_hidden_layers": 1 + max(int(match[1]) for match in layers if match),
        "num_attention_heads": width // _HEAD_SIZE,
        "patch_size": patch,
        "image_size": patch * math.isqrt(tokens - 1),
        "hidden_act": "gelu",
    }
