"""Encoders of Wan models. Tensors and metadata are those that musubi-tuner writes.

The VAE is diffusers' AutoencoderKLWan. It encodes videos and images to the normalised latents of
Wan 2.1 and 2.2. Weights: a diffusers folder, or the single file of the original release
(Wan2.1_VAE.pth, or .safetensors with the same names).

The CLIP image encoder encodes the first frame for Wan 2.1's image-to-video. It is the image half of
open-clip's xlm-roberta-large ViT-huge-14. Weights: a transformers folder, or the single file of the
original release (models_clip_open-clip-xlm-roberta-large-vit-huge-14.pth, or .safetensors with the
same names).
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from diffusers import AutoencoderKLWan
from diffusers.loaders.single_file_utils import convert_wan_vae_to_diffusers
from diffusers.models.autoencoders.autoencoder_kl_wan import WanCausalConv3d
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional

from latentmake.base.errors import ModelError
from latentmake.config.weights import Weights
from latentmake.encode.encoders.device import (
    DTYPES,
    compute_dtype,
    download,
    pixel_bytes,
    stacked,
    upload,
)
from latentmake.encode.encoders.local_state import State, load_network, place, refusing, renamed
from latentmake.encode.reading import Encoded, Loaded, Named, Sample, results
from latentmake.layouts.names import latents_key, musubi_latents_metadata
from latentmake.models.tensors import blocks_in
from latentmake.plan.orders import Order

if TYPE_CHECKING:
    from transformers import CLIPVisionModel

CHANNELS = 16
"""Number of channels of latents."""

_MASK_CHANNELS = 4
_FACTOR = 8  # pixels per latent, horizontally and vertically
_FRAMES = 4  # frames per latent frame; the first latent frame has only one
_VAE_HINT = (
    "set `vae` to Wan2.1_VAE.pth or its .safetensors, or to the `vae` folder of a Wan pipeline"
)


class _FeaturesOnCpu(list[Any]):
    """List of features that are kept in the CPU's memory and moved to the device on access."""

    def __init__(self, features: list[Any], device: torch.device) -> None:
        super().__init__(features)
        self._device = device

    def __setitem__(self, index: Any, value: Any) -> None:
        super().__setitem__(index, value.cpu() if isinstance(value, torch.Tensor) else value)

    def __getitem__(self, index: Any) -> Any:
        value = super().__getitem__(index)
        return value.to(self._device) if isinstance(value, torch.Tensor) else value


class _CausalConvolution(nn.Module):
    """Convolution of Wan that is two-dimensional for a frame with no frame before it.

    Such a frame (an image, or the first frame of a clip) meets only the kernel's last slice in
    time: the other slices fall on padding. On a CPU, two dimensions take half of the time. In
    bfloat16 the result is bit-equal; in float32 the order of summation differs.
    """

    def __init__(self, convolution: WanCausalConv3d) -> None:
        super().__init__()
        self.convolution = convolution

    def forward(self, values: torch.Tensor, earlier: torch.Tensor | None = None) -> torch.Tensor:
        """Convolve [N, C, F, H, W]; `earlier` is None, or up to two frames before `values`."""
        full = self.convolution
        is_padded = full._padding[4] == full.kernel_size[0] - 1
        if earlier is not None or values.shape[2] != 1 or not is_padded:
            convolved: torch.Tensor = full(values, earlier)
            return convolved
        weight, sides = full.weight[:, :, -1], (full._padding[2], full._padding[0])
        frame = functional.conv2d(values[:, :, 0], weight, full.bias, full.stride[1:], sides)
        return frame[:, :, None]


class WanVae:
    """Wan's VAE. Any number of threads may use it. It decodes if it was loaded with its decoder.

    Args:
        network: network with an encoder or a decoder.
        features_on_cpu: whether features of earlier frames are kept in the CPU's memory. Results
            are bit-equal; it takes less memory of the GPU and more time.
    """

    def __init__(self, network: AutoencoderKLWan, *, features_on_cpu: bool = False) -> None:
        self._network, self._features_on_cpu = network, features_on_cpu

    def frugal(self) -> WanVae:
        """Return a VAE with the same weights that keeps features in the CPU's memory."""
        return WanVae(self._network, features_on_cpu=True)

    def _own_network(self) -> AutoencoderKLWan:
        """Return a copy of the network for one call; it shares the weights.

        diffusers keeps the features of earlier frames in attributes of the network. Threads must
        not share them, and they are freed with the copy even if the encoding fails.
        """
        network = copy.copy(self._network)
        if self._features_on_cpu:
            clear = network.clear_cache

            def clear_cache() -> None:
                clear()
                network._enc_feat_map = _FeaturesOnCpu(network._enc_feat_map, network.device)

            network.clear_cache = clear_cache
        return network

    @torch.inference_mode()
    def encode(self, pixels: torch.Tensor, stored: torch.dtype) -> torch.Tensor:
        """Encode to normalised latents, (mode - mean) / std: [N, 16, n + 1, h, w], float32.

        Args:
            pixels: clips or images, [N, 4n + 1, 8h, 8w, 3], 0 to 255, uint8, on any device.
            stored: dtype of the cache. Pixels are cast to it first, as in musubi-tuner.
        """
        return self._latents(self._signal(pixels, stored))

    @torch.inference_mode()
    def encode_first_frame(self, pixels: torch.Tensor, stored: torch.dtype) -> torch.Tensor:
        """Encode the condition of image-to-video: the first frame, followed by grey frames.

        Returns:
            [N, 20, n + 1, h, w], float32, on the device. The first 4 channels are a mask: 1 for the
            first latent frame, 0 for the others. The other 16 channels are the latents.
        """
        signal = self._signal(pixels, stored)
        signal[:, :, 1:] = 0.0  # grey: the middle between -1 and 1
        latents = self._latents(signal)
        mask = latents.new_zeros(len(latents), _MASK_CHANNELS, *latents.shape[2:])
        # Latents of a broken network are all zeros. Without a mask the job refuses them as zeros.
        mask[:, :, 0] = _not_empty(latents)[:, :, 0]
        return torch.cat([mask, latents], dim=1)

    @torch.inference_mode()
    def decode(self, latents: torch.Tensor) -> NDArray[np.uint8]:
        """Decode the normalised latents [16, n + 1, h, w] of one clip.

        Returns:
            [4n + 1, 8h, 8w, 3], 0 to 255.
        """
        network = self._own_network()
        mean, deviation = self._moments(torch.device("cpu"))
        values = (latents.float().cpu() * deviation + mean).to(network.device, network.dtype)
        with torch.autocast(values.device.type, enabled=False):
            (signal,) = network.decode(values[None], return_dict=False)[0]
        frames = [  # one at a time, because float32 copies of all frames would double the memory
            pixel_bytes(frame) for frame in signal.permute(1, 2, 3, 0)
        ]
        pixels: NDArray[np.uint8] = torch.stack(frames).numpy()
        return pixels

    def tile(self) -> None:
        """Work in tiles of 256 x 256 pixels: less memory, slightly different pixels."""
        self._network.enable_tiling()

    def _signal(self, pixels: torch.Tensor, stored: torch.dtype) -> torch.Tensor:
        """Return [N, 3, F, H, W], -1 to 1, rounded to `stored`, in the dtype of the network."""
        frames, height, width = pixels.shape[1:4]
        if frames % _FRAMES != 1 or height % _FACTOR or width % _FACTOR:
            # diffusers would drop frames and edges silently.
            raise ValueError(f"{frames} frames of {height} x {width} are not 4n + 1 of 8k x 8m")
        network = self._network
        signal = upload(pixels, network.device).permute(0, 4, 1, 2, 3).to(stored) / 127.5 - 1.0
        return signal.contiguous().to(network.dtype)

    def _latents(self, signal: torch.Tensor) -> torch.Tensor:
        with torch.autocast(signal.device.type, enabled=False):
            mode = self._own_network().encode(signal).latent_dist.mode().float()
        mean, deviation = self._moments(mode.device)
        # Zeros of a broken network stay zeros, and the job refuses them. Normalised, they would
        # look like a picture.
        return torch.where(_not_empty(mode), (mode - mean) / deviation, 0.0)

    def _moments(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Return mean and deviation, both [16, 1, 1, 1], for latents [N, 16, f, h, w]."""
        config = self._network.config
        mean, deviation = (
            upload(torch.tensor(numbers), device)[:, None, None, None]
            for numbers in (config.latents_mean, config.latents_std)
        )
        return mean, deviation


def _not_empty(values: torch.Tensor) -> torch.Tensor:
    """Return which of N tensors have a non-zero value, [N, 1, 1, 1, 1]; does not wait for a GPU."""
    return values.flatten(1).any(dim=1)[:, None, None, None, None]


def load_wan_vae(
    weights: Weights,
    device: torch.device,
    dtype: torch.dtype,
    *,
    tiled: bool = False,
    decoder: bool = False,
) -> WanVae:
    """Load the encoder of Wan's VAE, or only its decoder; raises ModelError.

    On ROCm, half precision can overflow, so the VAE computes in float32.

    With `tiled` it needs less memory: it encodes one sample at a time, in tiles of 256 x 256 pixels
    that overlap by 64. Latents of pictures up to 256 x 256 stay bit-equal. Larger ones change,
    because convolutions and attention do not see beyond a tile.
    """
    network = load_network(
        weights,
        AutoencoderKLWan,
        "Wan's VAE",
        models=("AutoencoderKLWan",),
        hint=_VAE_HINT,
        converted=_vae_converted,
        inferred=_vae_inferred,
    )
    channels = network.config.z_dim
    if channels != CHANNELS or network.config.is_residual:
        what = f"is the VAE of another model: its latents have {channels} channels, not {CHANNELS}"
        raise ModelError(what, where=weights.path or weights.hub or "", hint=_VAE_HINT)
    with refusing(weights, "Wan's VAE", _VAE_HINT):
        torch.tensor([network.config.latents_mean, network.config.latents_std]).view(2, CHANNELS)
    if decoder:
        network.encoder = network.quant_conv = None
    else:
        network.decoder = network.post_quant_conv = None  # frees more than half of the memory
    rocm = device.type == "cuda" and torch.version.hip is not None
    place(network, device, torch.float32 if rocm else dtype)
    for block in [*network.modules()]:
        for name, child in block.named_children():
            if isinstance(child, WanCausalConv3d):
                setattr(block, name, _CausalConvolution(child))
    if tiled:
        network.enable_tiling()
        network.enable_slicing()
    return WanVae(network)


def _vae_converted(state: State) -> State:
    is_original = any(name.startswith("encoder.downsamples.") for name in state)
    return dict(convert_wan_vae_to_diffusers(state)) if is_original else state


def _vae_inferred(state: State) -> dict[str, Any]:
    """Derive the configuration from the shapes of weights; diffusers has defaults for the rest."""
    return {
        "base_dim": state["encoder.conv_in.weight"].shape[0],
        "decoder_base_dim": state["decoder.conv_out.weight"].shape[1],
        "z_dim": state["post_quant_conv.weight"].shape[0],
    }


# -- the image encoder ----------------------------------------------------------------------------

# Mean and deviation of the colour channels of CLIP's training images (source: openai/CLIP, clip.py)
_MEAN = (0.48145466, 0.4578275, 0.40821073)
_STD = (0.26862954, 0.26130258, 0.27577711)
_HEAD_SIZE = 80  # ViT-huge's size of an attention head; no shape of a weight shows it
# Patterns in the names of the original release, and a prefix of transformers' older files.
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
# Parts of CLIP that do not affect the hidden states of its image encoder.
_FOREIGN = (
    r"textual\.|visual\.head$|log_scale$|text_model\.|(text|visual)_projection\.|logit_scale$"
    r"|(.+\.)?position_ids$"
)


class ClipVision:
    """CLIP's image encoder without its last block: Wan uses the output of the block before it."""

    def __init__(self, network: CLIPVisionModel) -> None:
        network.encoder.layers = network.encoder.layers[:-1]
        self._network = network

    @torch.inference_mode()
    def encode(
        self, frames: torch.Tensor, pixel_dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        """Encode the first frames of clips.

        Args:
            frames: [N, H, W, 3], 0 to 255, uint8, on any device. They are squeezed to the network's
                square input, as in Wan.
            pixel_dtype: dtype in which pixels are normalised and resized. musubi-tuner uses the
                dtype of the latents.

        Returns:
            [N, 257, 1280] (a class token, then one token per patch), float16, on the device.
        """
        network = self._network
        signal = upload(frames, network.device).permute(0, 3, 1, 2).to(pixel_dtype) / 127.5 - 1.0
        side = network.config.image_size
        signal = functional.interpolate(
            signal, size=(side, side), mode="bicubic", align_corners=False
        )
        mean, deviation = (
            upload(torch.tensor(numbers, dtype=pixel_dtype), signal.device)[:, None, None]
            for numbers in (_MEAN, _STD)
        )
        signal = (signal * 0.5 + 0.5 - mean) / deviation
        with torch.autocast(signal.device.type, enabled=False):
            hidden = network(signal.to(network.dtype)).last_hidden_state
        tokens: torch.Tensor = hidden.to(torch.float16)
        return tokens


def load_clip_vision(weights: Weights, device: torch.device) -> ClipVision:
    """Load the CLIP image encoder, in float32 on a CPU, else in float16; raises ModelError."""
    from transformers import CLIPVisionModel  # imported late: few jobs use CLIP

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
    dtype = torch.float32 if device.type == "cpu" else torch.float16
    return ClipVision(place(network, device, dtype))


def _converted(state: State) -> State:
    """Give the image encoder's weights the names of transformers, and drop all other weights."""
    own = {name: value for name, value in state.items() if not re.match(_FOREIGN, name)}
    converted: State = {}
    for name, value in renamed(own, _NAMES).items():
        if ".qkv." in name:
            for letter, part in zip("qkv", value.chunk(3), strict=True):
                converted[name.replace("qkv", f"{letter}_proj")] = part
        else:
            converted[name] = value
    # In the original release, embeddings have further axes of length 1.
    for name, axes in (("class_embedding", 1), ("position_embedding.weight", 2)):
        if (embedding := converted.get(f"embeddings.{name}")) is not None:
            converted[f"embeddings.{name}"] = embedding.reshape(embedding.shape[-axes:])
    return converted


def _inferred(state: State) -> dict[str, Any]:
    """Derive the configuration from the shapes of weights; the rest is ViT-huge's."""
    width, _, patch, _ = state["embeddings.patch_embedding.weight"].shape
    if width % _HEAD_SIZE:
        raise ValueError(f"it has width {width}, which is no ViT-huge")
    tokens = state["embeddings.position_embedding.weight"].shape[0]
    return {
        "hidden_size": width,
        "intermediate_size": state["encoder.layers.0.mlp.fc1.weight"].shape[0],
        "num_hidden_layers": blocks_in(state, r"encoder\.layers\.(\d+)\."),
        "num_attention_heads": width // _HEAD_SIZE,
        "patch_size": patch,
        "image_size": patch * math.isqrt(tokens - 1),
        "hidden_act": "gelu",
    }


# -- the encoder of an order -----------------------------------------------------------------------


def latents(order: Order, device: torch.device, say: Callable[[str], None]) -> Loaded:
    """Load the VAE, and for Wan 2.1 image-to-video the CLIP image encoder."""
    model = order.model_settings
    name = model.vae_dtype or model.dtype
    stored = DTYPES[name]
    # musubi-tuner's script computes in this dtype, too. In float32 a CPU takes 1.7 times as long.
    computed = compute_dtype(device, name, say, cpu_bfloat16=True)
    vae = load_wan_vae(model.vae, device, computed, tiled=model.vae_cache_cpu)
    clip = None if model.clip is None else load_clip_vision(model.clip, device)

    def frames_of(arrays: list[NDArray[np.uint8]]) -> torch.Tensor:
        """Return clips [N, F, H, W, 3]; an image becomes a clip of one frame."""
        pixels = stacked(arrays, device)
        return pixels if pixels.dim() == 5 else pixels[:, None]

    def encode(samples: list[Sample], vae: WanVae = vae) -> Encoded:
        pixels = frames_of([np.asarray(sample.content) for sample in samples])
        tensors_by_kind = {"latents": vae.encode(pixels, stored)}
        if model.image_to_video:
            tensors_by_kind["latents_image"] = vae.encode_first_frame(pixels, stored)
        if samples[0].control is not None:
            control = frames_of([np.asarray(sample.control) for sample in samples])
            tensors_by_kind["latents_control"] = vae.encode(control, stored)
        rows = {
            latents_key(kind, tuple(values.shape[1:]), name): values.to(stored)
            for kind, values in tensors_by_kind.items()
        }
        if clip is not None:
            rows[f"clip_{name}"] = clip.encode(pixels[:, 0], stored)
        names, (frames, height, width) = [*rows], pixels.shape[1:4]

        def named(sample: Sample, *tensors: torch.Tensor) -> Named:
            is_clip = len(sample.shape) == 4
            size = (width, height, frames) if is_clip else (*sample.original, None)
            return dict(zip(names, tensors, strict=True)), musubi_latents_metadata(*size)

        return results(samples, download([*rows.values()]), named)

    return Loaded(encode, frugal=partial(encode, vae=vae.frugal()))
