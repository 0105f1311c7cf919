"""Encoders of Wan models, with tensors and metadata as musubi-tuner's.

The CLIP image encoder for the first frame of Wan 2.1's image-to-video is the image half of
open-clip's xlm-roberta-large ViT-huge-14. Weights: a transformers folder, or the one file of the
original release (models_clip_open-clip-xlm-roberta-large-vit-huge-14.pth, or .safetensors of the
same names).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from latentmake.caches.encoders.device import DTYPES, compute_dtype, download, stacked, upload
from latentmake.caches.encoders.local_state import State, load_network, place, renamed
from latentmake.caches.inputs import Encoded, Loaded, Named, Sample, results
from latentmake.config.weights import Weights
from latentmake.layouts import layout
from latentmake.plan.orders import Order

if TYPE_CHECKING:
    from transformers import CLIPVisionModel

# Colour channels of CLIP's training images (source: openai/CLIP, clip.py).
_MEAN = (0.48145466, 0.4578275, 0.40821073)
_STD = (0.26862954, 0.26130258, 0.27577711)
_HEAD_SIZE = 80  # of ViT-huge; not visible in any shape
# Patterns in the original's names; transformers' older files have a prefix, too.
_NAMES = {
    r"^(visual|vision_model)\.": "",
    r"^transformer\.": "encoder.layers.",
    r"^cls_embedding": "embeddings.class_embedding",
    r"^pos_embedding": "embeddings.position_embedding.weight",
    r"^patch_embedding\.": "embeddings.patch_embedding.",
    r"^pre_norm\.": "pre_layrnorm.",
    r"^post_norm\.": "post_layernorm.",
    r"\.norm(\d)\.": r".layer_norm\1.",
    r"\.attn\.proj\.": ".self_attn.out_proj.",
    r"\.attn\.to_qkv\.": ".self_attn.qkv.",
    r"\.mlp\.0\.": ".mlp.fc1.",
    r"\.mlp\.2\.": ".mlp.fc2.",
}
# Parts of CLIP that the hidden states of its image encoder do not depend on.
_FOREIGN = (
    r"textual\.|visual\.head$|log_scale$|text_model\.|(text|visual)_projection\.|logit_scale$"
    r"|(.+\.)?position_ids$"
)


class ClipVision:
    """CLIP's image encoder without its last block: Wan takes the output of the one before it."""

    def __init__(self, network: CLIPVisionModel) -> None:
        network.encoder.layers = network.encoder.layers[:-1]
        self._network = network

    @torch.inference_mode()
    def encode(
        self, frames: torch.Tensor, pixel_dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        """Encode the first frames of clips.

        Args:
            frames: [N, H, W, 3], 0 to 255, uint8, on any device; squeezed to the network's square,
                as Wan does.
            pixel_dtype: in which pixels are scaled and resized; musubi-tuner uses that of latents.

        Returns:
            [N, 257, 1280] (a token for the class, then one per patch), float16, on the device.
        """
        network = self._network
        signal = upload(frames, network.device).permute(0, 3, 1, 2).to(pixel_dtype) / 127.5 - 1.0
        side = network.config.image_size
        signal = torch.nn.functional.interpolate(
            signal, size=(side, side), mode="bicubic", align_corners=False
        )
        mean, deviation = (
            upload(torch.tensor(each, dtype=pixel_dtype), signal.device)[:, None, None]
            for each in (_MEAN, _STD)
        )
        signal = (signal * 0.5 + 0.5 - mean) / deviation
        with torch.autocast(signal.device.type, enabled=False):
            hidden = network(signal.to(network.dtype)).last_hidden_state
        found: torch.Tensor = hidden.to(torch.float16)
        return found


def load_clip_vision(weights: Weights, device: torch.device, dtype: torch.dtype) -> ClipVision:
    """Load the CLIP image encoder for inference.

    Raises:
        ModelError: it is missing, incomplete, or of another kind.
    """
    from transformers import CLIPVisionModel  # which a job without CLIP does without

    network = load_network(
        weights,
        CLIPVisionModel,
        "a CLIP image encoder",
        models=("clip_vision_model", "clip"),
        hint="set `clip` to models_clip_open-clip-xlm-roberta-large-vit-huge-14.pth or its "
        ".safetensors, or to the `image_encoder` folder of a Wan pipeline",
        converted=_converted,
        inferred=_inferred,
        foreign=_FOREIGN,
    )
    return ClipVision(place(network, device, dtype))


def _converted(state: State) -> State:
    """Name the image encoder's weights as transformers does, and drop all others."""
    own = {name: value for name, value in state.items() if not re.match(_FOREIGN, name)}
    found: State = {}
    for name, value in renamed(own, _NAMES).items():
        if ".qkv." in name:
            for letter, part in zip("qkv", value.chunk(3), strict=True):
                found[name.replace("qkv", f"{letter}_proj")] = part
        else:
            found[name] = value
    # The original's have axes of length 1 for the batch, and for the one class token.
    for name, axes in (("class_embedding", 1), ("position_embedding.weight", 2)):
        if (embedding := found.get(f"embeddings.{name}")) is not None:
            found[f"embeddings.{name}"] = embedding.reshape(embedding.shape[-axes:])
    return found


def _inferred(state: State) -> dict[str, Any]:
    """Read the configuration off the shapes of weights; the rest is that of ViT-huge."""
    width, _, patch, _ = state["embeddings.patch_embedding.weight"].shape
    if width % _HEAD_SIZE:
        raise ValueError(f"it has width {width}, which is no ViT-huge")
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


def latents(order: Order, device: torch.device, say: Callable[[str], None]) -> Loaded:
    """Load the VAE, and for Wan 2.1 image-to-video the CLIP image encoder."""
    from latentmake.caches.encoders.wan_vae import WanVae, load_wan_vae

    model = order.model_settings
    name = model.vae_dtype or model.dtype
    stored = DTYPES[name]
    # As musubi-tuner's script does; in float32 a CPU takes 1.7 times as long.
    computed = compute_dtype(device, name, say, cpu_bfloat16=True)
    vae = load_wan_vae(model.vae, device, computed, tiled=model.vae_cache_cpu)
    clip = None
    if model.clip is not None:
        half = torch.float32 if device.type == "cpu" else torch.float16
        clip = load_clip_vision(model.clip, device, half)

    def frames_of(arrays: list[NDArray[np.uint8]]) -> torch.Tensor:
        """Return images, as clips of one frame, or clips: [N, F, H, W, 3]."""
        found = stacked(arrays, device)
        return found if found.dim() == 5 else found[:, None]

    def encode(samples: list[Sample], vae: WanVae = vae) -> Encoded:
        pixels = frames_of([np.asarray(sample.content) for sample in samples])
        made = {"latents": vae.encode(pixels, stored)}
        if model.image_to_video:
            made["latents_image"] = vae.encode_first_frame(pixels, stored)
        if samples[0].control is not None:
            control = frames_of([np.asarray(sample.control) for sample in samples])
            made["latents_control"] = vae.encode(control, stored)
        rows = {
            layout.latents_key(kind, tuple(x.shape[1:]), name): x.to(stored)
            for kind, x in made.items()
        }
        if clip is not None:
            rows[f"clip_{name}"] = clip.encode(pixels[:, 0], stored)
        names, (frames, height, width) = [*rows], pixels.shape[1:4]

        def named(sample: Sample, *tensors: torch.Tensor) -> Named:
            size = (width, height, frames) if sample.clip else (*sample.original, None)
            return dict(zip(names, tensors, strict=True)), layout.musubi_latents_metadata(*size)

        return results(samples, download([*rows.values()]), named)

    return Loaded(encode, frugal=partial(encode, vae=vae.frugal()))


def text(order: Order, device: torch.device, say: Callable[[str], None]) -> Loaded:
    """Load umT5."""
    from latentmake.caches.encoders.text import TextEncoders, load_umt5

    def named(caption: str, tensors: dict[str, torch.Tensor]) -> Named:
        (embedding,) = tensors.values()
        return {"varlen_t5_bfloat16": embedding}, layout.text_metadata(caption)

    model, computed = order.model_settings, compute_dtype(device, "bfloat16", say)
    encoder = load_umt5(model.text[0], device, computed, fp8=model.fp8_t5)
    return TextEncoders({"umT5": encoder}).loaded(named)
