"""The VAE of the tiny bundle, trained within half a minute on two CPU cores.

A VAE with ordinary initial weights learns colours only after thousands of steps. This one starts
from what such a VAE learns first: the encoder averages blocks of 8 x 8 pixels into red, green and
blue latents, the decoder enlarges them smoothly. Training then adds the shapes.
"""

from __future__ import annotations

import math
from typing import TypeAlias

import torch
from diffusers import AutoencoderKL
from diffusers.models.downsampling import Downsample2D
from diffusers.models.resnet import ResnetBlock2D
from diffusers.models.upsampling import Upsample2D
from torch import Tensor, nn

from demo.descent import train_vae

__all__ = ["encode", "make_autoencoder", "train_autoencoder"]

_Normed: TypeAlias = tuple[nn.GroupNorm, nn.Conv2d, ResnetBlock2D]

_WIDTHS = (8, 16, 32, 64)
_LATENTS = 8  # as many as let 8 x 8 pixels have an edge in them
_RANDOM_SHARE = 0.3  # how much of the ordinary initial weights remains beside the thumbnail's
_LEARNING_RATE = 2e-3
_BATCH = 8
_CROP = 32  # most steps see only crops of this many pixels a side, which are four times cheaper
_CROP_SHARE = 0.75


def make_autoencoder() -> AutoencoderKL:
    """Return an `AutoencoderKL` (8 latent channels, 1/8 of the side) initialized as a thumbnail.

    Drawn from torch's global generator.
    """
    # One group: group normalization would otherwise level out the colours, channel by channel.
    autoencoder = AutoencoderKL(
        block_out_channels=_WIDTHS,
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        layers_per_block=1,
        latent_channels=_LATENTS,
        norm_num_groups=1,
        mid_block_add_attention=False,
        sample_size=64,
    )
    encoder, decoder = autoencoder.encoder, autoencoder.decoder
    with torch.no_grad():
        for module in autoencoder.modules():
            if isinstance(module, ResnetBlock2D):
                _start_as_identity(module)
            elif isinstance(module, Downsample2D | Upsample2D):
                _start_as_resize(module.conv, enlarge=isinstance(module, Upsample2D))
        _pass_on(encoder.conv_in, channels=3, random_share=1.0)
        _pass_on(decoder.conv_in, channels=_LATENTS, random_share=_RANDOM_SHARE)
        for convolution in (autoencoder.quant_conv, autoencoder.post_quant_conv):
            _pass_on(convolution, channels=convolution.out_channels, random_share=0.0)
        _start_linear(
            (encoder.conv_norm_out, encoder.conv_out, encoder.mid_block.resnets[-1]), _LATENTS
        )
        _start_linear(
            (decoder.conv_norm_out, decoder.conv_out, decoder.up_blocks[-1].resnets[-1]), 3
        )
    return autoencoder


def _start_as_identity(block: ResnetBlock2D) -> None:
    block.conv2.weight.zero_()
    block.conv2.bias.zero_()
    if block.conv_shortcut is not None:
        weight = block.conv_shortcut.weight
        kept = min(weight.shape[:2])
        weight[:kept] *= _RANDOM_SHARE
        weight[range(kept), range(kept)] += 1
        block.conv_shortcut.bias.zero_()


def _start_as_resize(convolution: nn.Conv2d, *, enlarge: bool) -> None:
    """Initialize as the mean of 2 x 2 pixels, or as a smoothing of repeated pixels."""
    # On the way down diffusers pads the lower and right sides alone: two taps cover a block.
    line = torch.tensor([0.25, 0.5, 0.25] if enlarge else [0.5, 0.5, 0.0])
    channels = range(convolution.out_channels)
    convolution.weight *= _RANDOM_SHARE
    convolution.weight[channels, channels] += torch.outer(line, line)
    assert convolution.bias is not None
    convolution.bias.zero_()


def _pass_on(
    convolution: nn.Conv2d, *, channels: int, random_share: float, gain: float = 1.0
) -> None:
    """Let the first `channels` through, times `gain`; the others keep random weights."""
    middle = convolution.kernel_size[0] // 2
    convolution.weight *= random_share
    convolution.weight[:channels] = 0
    convolution.weight[range(channels), range(channels), middle, middle] = gain
    assert convolution.bias is not None
    convolution.bias.zero_()


def _start_linear(parts: _Normed, channels: int) -> None:
    """Make normalization, SiLU and the last convolution pass the first `channels` nearly as is.

    Two spare channels are held at a large plus and minus: they decide the normalization's mean and
    deviation, so that these hardly depend on the picture. The bias moves the values to where SiLU
    is close to a straight line; the convolution undoes its slope and its offset.
    """
    norm, convolution, block = parts
    height, bias = 8.0, 2.0
    width = norm.num_channels // norm.num_groups
    for group in range(norm.num_groups):
        block.conv2.bias[(group + 1) * width - 2] = -height
        block.conv2.bias[(group + 1) * width - 1] = height
    norm.weight[:channels] = height * math.sqrt(2 / width)
    norm.bias[:channels] = bias
    sigmoid = 1 / (1 + math.exp(-bias))
    slope = sigmoid * (1 + bias * (1 - sigmoid))
    _pass_on(convolution, channels=channels, random_share=_RANDOM_SHARE, gain=1 / slope)
    assert convolution.bias is not None
    convolution.bias[:channels] = -bias * sigmoid / slope


def train_autoencoder(
    autoencoder: AutoencoderKL, pictures: Tensor, steps: int, generator: torch.Generator
) -> None:
    """Train an autoencoder and set its `scaling_factor`.

    The factor makes the latents' standard deviation 1 (Rombach et al. 2022, section D.1).

    Args:
        autoencoder: changed in place.
        pictures: [count, 3, height, width] in -1 to 1.
        steps: optimizer steps.
        generator: draws the batches.
    """
    train_vae(
        autoencoder,
        lambda step: _batch(pictures, generator, cropped=step < _CROP_SHARE * steps),
        steps,
        name="tiny VAE",
        learning_rate=_LEARNING_RATE,
    )
    deviation = encode(autoencoder, pictures[:256], scaling_factor=1.0).std().item()
    autoencoder.register_to_config(scaling_factor=1 / deviation)


def _batch(pictures: Tensor, generator: torch.Generator, *, cropped: bool) -> Tensor:
    count = 2 * _BATCH if cropped else _BATCH
    batch = pictures[torch.randint(len(pictures), (count,), generator=generator)]
    if not cropped:
        return batch
    top, left = (
        int(torch.randint((side - _CROP) // 4 + 1, (), generator=generator)) * 4
        for side in pictures.shape[2:]
    )
    return batch[:, :, top : top + _CROP, left : left + _CROP]


def encode(
    autoencoder: AutoencoderKL, pictures: Tensor, *, scaling_factor: float | None = None
) -> Tensor:
    """Return scaled latents [count, 8, height / 8, width / 8] of pictures in -1 to 1."""
    factor = autoencoder.config.scaling_factor if scaling_factor is None else scaling_factor
    with torch.no_grad():
        means = [autoencoder.encode(part).latent_dist.mean for part in torch.split(pictures, 64)]
    return torch.cat(means) * float(factor)
