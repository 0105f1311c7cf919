"""Wan's VAE: videos and images to the normalised latents of Wan 2.1 and 2.2.

Based on diffusers' AutoencoderKLWan. Weights: a diffusers folder, or the one file of the original
release (Wan2.1_VAE.pth, or .safetensors of the same names).
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from diffusers import AutoencoderKLWan
from diffusers.loaders.single_file_utils import convert_wan_vae_to_diffusers
from diffusers.models.autoencoders.autoencoder_kl_wan import WanCausalConv3d
from numpy.typing import NDArray
from torch.nn import functional

from latentmake.caches.encoders.device import upload
from latentmake.caches.encoders.local_state import State, load_network, place
from latentmake.config.weights import Weights
from latentmake.errors import ModelError

CHANNELS = 16
"""Channels of latents."""

_MASK_CHANNELS = 4
_FACTOR = 8  # pixels per latent and side
_FRAMES = 4  # frames per latent, after the first
_HINT = "set `vae` to Wan2.1_VAE.pth or its .safetensors, or to the `vae` folder of a Wan pipeline"


class _FeaturesOnCpu(list[Any]):
    """Features kept in the CPU's memory, and moved back to the device on access."""

    def __init__(self, features: list[Any], device: torch.device) -> None:
        super().__init__(features)
        self._device = device

    def __setitem__(self, index: Any, value: Any) -> None:
        super().__setitem__(index, value.cpu() if isinstance(value, torch.Tensor) else value)

    def __getitem__(self, index: Any) -> Any:
        value = super().__getitem__(index)
        return value.to(self._device) if isinstance(value, torch.Tensor) else value


class _CausalConvolution(WanCausalConv3d):  # type: ignore[misc]
    """Convolves a frame with none before it in two dimensions.

    Of a kernel in time such a frame, an image or the first of a clip, meets the last slice alone:
    the others fall on padding. On a CPU that takes half of the time; its bits are the same in
    bfloat16, and in float32 sums are formed in another order.
    """

    def forward(self, values: torch.Tensor, earlier: torch.Tensor | None = None) -> torch.Tensor:
        """Convolve [N, C, F, H, W]; `earlier` holds up to two frames before them, or is None."""
        before = self.kernel_size[0] - 1
        if earlier is not None or values.shape[2] != 1 or self._padding[4] != before:
            convolved: torch.Tensor = super().forward(values, earlier)
            return convolved
        weight, sides = self.weight[:, :, -1], (self._padding[2], self._padding[0])
        frame = functional.conv2d(values[:, :, 0], weight, self.bias, self.stride[1:], sides)
        return frame[:, :, None]


class WanVae:
    """Wan's VAE, for several threads at once. It decodes if it was loaded with its decoder.

    Args:
        network: to encode or decode with.
        features_on_cpu: keep features of earlier frames in the CPU's memory: bit-equal, less memory
            of the GPU, slower.
    """

    def __init__(self, network: AutoencoderKLWan, *, features_on_cpu: bool = False) -> None:
        self._network, self._features_on_cpu = network, features_on_cpu

    def frugal(self) -> WanVae:
        """Return one of the same weights that keeps features in the CPU's memory."""
        return WanVae(self._network, features_on_cpu=True)

    def _own_network(self) -> AutoencoderKLWan:
        """Return a copy for one call, which shares the weights.

        diffusers keeps the features of earlier frames in attributes of the network. They are gone
        with the copy, also where an encoding fails.
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
            stored: dtype of the cache. Pixels are cast to it first, as by musubi-tuner.
        """
        return self._latents(self._signal(pixels, stored))

    @torch.inference_mode()
    def encode_first_frame(self, pixels: torch.Tensor, stored: torch.dtype) -> torch.Tensor:
        """Encode the condition of image-to-video: the first frame, with grey ones after it.

        Returns:
            [N, 20, n + 1, h, w], float32, on the device: 4 channels of a mask, 1 on the first
            latent frame and 0 on the others, then the 16 of the latents.
        """
        signal = self._signal(pixels, stored)
        signal[:, :, 1:] = 0.0  # the middle of -1 to 1
        latents = self._latents(signal)
        mask = latents.new_zeros(len(latents), _MASK_CHANNELS, *latents.shape[2:])
        # Latents of a broken network, nothing but zeros, get no mask and are refused later.
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
        frames = [  # one at a time: all of them in float32 would take as much again
            ((frame.float() + 1) * 127.5).round().clamp(0, 255).to(torch.uint8).cpu()
            for frame in signal.permute(1, 2, 3, 0)
        ]
        found: NDArray[np.uint8] = torch.stack(frames).numpy()
        return found

    def tile(self) -> None:
        """Work in tiles of 256 x 256 pixels from now on: less memory, slightly other pixels."""
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
        # Zeros of a broken network stay zeros: normalised, they would look like a picture.
        return torch.where(_not_empty(mode), (mode - mean) / deviation, 0.0)

    def _moments(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Return mean and deviation, each [16, 1, 1, 1], for [N, 16, f, h, w]."""
        config = self._network.config
        mean, deviation = (
            upload(torch.tensor(each), device)[:, None, None, None]
            for each in (config.latents_mean, config.latents_std)
        )
        return mean, deviation


def _not_empty(values: torch.Tensor) -> torch.Tensor:
    """Return which of N tensors hold more than zeros, [N, 1, 1, 1, 1]; a GPU is not waited for."""
    return values.flatten(1).any(dim=1)[:, None, None, None, None]


def load_wan_vae(
    weights: Weights,
    device: torch.device,
    dtype: torch.dtype,
    *,
    tiled: bool = False,
    decoder: bool = False,
) -> WanVae:
    """Load Wan's VAE for encoding, or its decoder alone.

    On ROCm, where half precision can overflow, it computes in float32.

    `tiled` needs less memory: one sample at a time, in tiles of 256 x 256 pixels that overlap by
    64. Latents of pictures up to 256 x 256 stay bit-equal; larger ones change, for a tile's
    convolutions and attention see nothing beyond it.

    Raises:
        ModelError: it is missing, incomplete, or of another kind.
    """
    network = load_network(
        weights,
        AutoencoderKLWan,
        "Wan's VAE",
        models=("AutoencoderKLWan",),
        hint=_HINT,
        converted=_converted,
        inferred=_inferred,
    )
    channels = network.config.z_dim
    if channels != CHANNELS or network.config.is_residual:
        what = f"is the VAE of another model: its latents have {channels} channels, not {CHANNELS}"
        raise ModelError(what, where=weights.path or weights.hub or "", hint=_HINT)
    if decoder:
        network.encoder = network.quant_conv = None
    else:
        network.decoder = network.post_quant_conv = None  # more than half of the memory
    rocm = device.type == "cuda" and torch.version.hip is not None
    place(network, device, torch.float32 if rocm else dtype)
    for module in network.modules():
        if type(module) is WanCausalConv3d:
            module.__class__ = _CausalConvolution
    if tiled:
        network.enable_tiling()
        network.enable_slicing()
    return WanVae(network)


def _converted(state: State) -> State:
    if any(name.startswith("encoder.downsamples.") for name in state):
        converted: State = convert_wan_vae_to_diffusers(state)
        return converted
    return state


def _inferred(state: State) -> dict[str, Any]:
    """Read the configuration off the shapes of weights; the rest is diffusers' defaults."""
    return {
        "base_dim": state["encoder.conv_in.weight"].shape[0],
        "decoder_base_dim": state["decoder.conv_out.weight"].shape[1],
        "z_dim": state["post_quant_conv.weight"].shape[0],
    }
