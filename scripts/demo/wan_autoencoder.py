"""The VAE of the tiny Wan bundle, trained within half a minute on two CPU cores.

As in `autoencoder`, training starts from a thumbnail. Blocks of 8 x 8 pixels are averaged; of four
frames the latents hold, as Haar wavelets do, their mean and the differences between earlier and
later ones. Training then adds the shapes.
"""

from __future__ import annotations

import torch
from diffusers import AutoencoderKLWan
from diffusers.models.autoencoders.autoencoder_kl_wan import (
    WanResample,
    WanResidualBlock,
    WanRMS_norm,
)
from torch import Tensor, nn

from demo.descent import train_vae

__all__ = ["encode_clips", "make_wan_autoencoder", "train_wan_autoencoder"]

_WIDTH = 8
_LATENTS = 16
_COLOURS = 3
_GROUP = 4  # frames in one of the latents'
_RANDOM_SHARE = 0.3  # how much of the ordinary initial weights remains beside the thumbnail's
_HEIGHT = 8.0  # of a spare channel that decides the normalization
_NO_NOISE = -10.0  # logarithm of the posterior's variance
_LEARNING_RATE = 1.5e-3
_BATCH = 4
_CROP = 32  # most steps see only crops of this many pixels a side, which are cheaper
_FRAMES = 5  # of a crop
_MEASURED = 32  # clips of which the statistics of latents are taken


def make_wan_autoencoder() -> AutoencoderKLWan:
    """Return an `AutoencoderKLWan` of 16 latent channels, initialized as a thumbnail.

    Drawn from torch's global generator.
    """
    autoencoder = AutoencoderKLWan(base_dim=_WIDTH, z_dim=_LATENTS, num_res_blocks=1)
    encoder, decoder = autoencoder.encoder, autoencoder.decoder
    with torch.no_grad():
        for module in autoencoder.modules():
            if isinstance(module, WanResidualBlock):
                _start_as_identity(module)
            elif isinstance(module, WanResample):
                _start_as_resize(module)
        for half in (encoder, decoder):
            for attention in half.mid_block.attentions:
                for value in attention.proj.parameters():
                    value.zero_()
        _pass_on(encoder.conv_in, _COLOURS, random_share=1.0)
        _pass_on(decoder.conv_in, _LATENTS, random_share=_RANDOM_SHARE)
        # The posterior's logarithm of the variance is a constant.
        _pass_on(autoencoder.quant_conv, _LATENTS, random_share=0.0)
        autoencoder.quant_conv.bias[_LATENTS:] = _NO_NOISE
        _pass_on(autoencoder.post_quant_conv, _LATENTS, random_share=0.0)
        last = encoder.mid_block.resnets[-1]
        _start_linear(encoder.norm_out, encoder.conv_out, last, _COLOURS * _GROUP)
        last = decoder.up_blocks[-1].resnets[-1]
        _start_linear(decoder.norm_out, decoder.conv_out, last, _COLOURS)
    return autoencoder


def _start_as_identity(block: WanResidualBlock) -> None:
    block.conv2.weight.zero_()
    block.conv2.bias.zero_()
    if isinstance(block.conv_shortcut, nn.Conv3d):
        weight = block.conv_shortcut.weight
        kept = min(weight.shape[:2])
        weight[:kept] *= _RANDOM_SHARE
        weight[range(kept), range(kept)] += 1
        assert block.conv_shortcut.bias is not None
        block.conv_shortcut.bias.zero_()


def _start_as_resize(block: WanResample) -> None:
    """Initialize as the mean of 2 x 2 pixels or a smoothing of repeated ones, and as wavelets."""
    enlarge = block.mode.startswith("upsample")
    convolution = block.resample[1]
    # On the way down the lower and right sides alone are padded: two taps cover a block.
    line = torch.tensor([0.25, 0.5, 0.25] if enlarge else [0.5, 0.5, 0.0])
    channels = range(convolution.out_channels)
    convolution.weight *= _RANDOM_SHARE
    convolution.weight[channels, channels] += torch.outer(line, line)
    convolution.bias.zero_()
    if not hasattr(block, "time_conv"):
        return
    weight = block.time_conv.weight  # [out, in, 3, 1, 1]
    weight *= _RANDOM_SHARE
    block.time_conv.bias.zero_()
    count = 2 * _COLOURS if block.dim == 4 * _WIDTH else _COLOURS
    for channel in range(count):
        if enlarge:  # the earlier frame is the mean minus the difference, the later one the sum
            for later, sign in ((0, -1.0), (1, 1.0)):
                out = channel + later * block.dim
                weight[out] = 0
                weight[out, channel, 2] = 1
                weight[out, channel + count, 2] = sign
        else:  # the last two taps are the two frames of a pair
            weight[channel] = weight[channel + count] = 0
            weight[channel, channel, 1:] = 0.5
            weight[channel + count, channel, 1] = -0.5
            weight[channel + count, channel, 2] = 0.5


def _pass_on(convolution: nn.Conv3d, channels: int, *, random_share: float) -> None:
    """Let the first `channels` of this moment through; the others keep random weights."""
    middle = convolution.kernel_size[1] // 2
    convolution.weight *= random_share
    convolution.weight[:channels] = 0
    convolution.weight[range(channels), range(channels), -1, middle, middle] = 1
    assert convolution.bias is not None
    convolution.bias.zero_()


def _start_linear(
    norm: WanRMS_norm, convolution: nn.Conv3d, block: WanResidualBlock, channels: int
) -> None:
    """Make normalization, SiLU and the last convolution pass the first `channels` nearly as is.

    A spare channel is held at a large constant, so that the normalization hardly depends on the
    picture; it gives nothing to the outcome. Around zero SiLU is x / 2 + x^2 / 4, and small values
    are passed on nearly unchanged after doubling.
    """
    width = convolution.in_channels
    block.conv2.bias[width - 1] = _HEIGHT
    norm.gamma[:] = 1.0
    # A value x becomes x / height * sqrt(width) * gamma; half of that after SiLU.
    small = 0.5
    norm.gamma[:channels] = small / width**0.5
    convolution.weight *= _RANDOM_SHARE
    convolution.weight[:channels] = 0
    middle = convolution.kernel_size[1] // 2
    convolution.weight[range(channels), range(channels), -1, middle, middle] = 2 * _HEIGHT / small
    assert convolution.bias is not None
    convolution.bias.zero_()


def train_wan_autoencoder(
    autoencoder: AutoencoderKLWan, clips: Tensor, steps: int, generator: torch.Generator
) -> None:
    """Train an autoencoder, then give its latents the means and the spread of Wan's own.

    Args:
        autoencoder: changed in place.
        clips: [count, 3, frames, height, width] in -1 to 1.
        steps: optimizer steps.
        generator: draws the batches.
    """
    train_vae(
        autoencoder,
        lambda _: _batch(clips, generator),
        steps,
        name="tiny Wan VAE",
        learning_rate=_LEARNING_RATE,
    )
    _take_on_statistics(autoencoder, clips[:_MEASURED])


def _take_on_statistics(autoencoder: AutoencoderKLWan, clips: Tensor) -> None:
    """Give latents the mean and spread that Wan's configuration says, by the outermost layers.

    One factor for all channels, as with the scaling factor of Stable Diffusion: a channel that
    tells little stays small after normalization.
    """
    mean, deviation = (
        torch.tensor(values)
        for values in (autoencoder.config.latents_mean, autoencoder.config.latents_std)
    )
    inner, outer = autoencoder.quant_conv, autoencoder.post_quant_conv
    with torch.no_grad():
        latents = autoencoder.encode(clips).latent_dist.mean.transpose(0, 1).flatten(1)
        middle = latents.mean(dim=1)
        factor = deviation / (latents - middle[:, None]).std()
        inner.weight[:_LATENTS] *= factor[:, None, None, None, None]
        inner.bias[:_LATENTS] = (inner.bias[:_LATENTS] - middle) * factor + mean
        outer.bias += outer.weight[:, :, 0, 0, 0] @ (middle - mean / factor)
        outer.weight /= factor[None, :, None, None, None]


def encode_clips(autoencoder: AutoencoderKLWan, clips: Tensor) -> Tensor:
    """Return normalized latents [count, 16, frames / 4 + 1, height / 8, width / 8] of clips."""
    mean, deviation = (
        torch.tensor(values)[:, None, None, None]
        for values in (autoencoder.config.latents_mean, autoencoder.config.latents_std)
    )
    with torch.no_grad():
        parts = [autoencoder.encode(part).latent_dist.mean for part in torch.split(clips, 16)]
    return (torch.cat(parts) - mean) / deviation


def _batch(clips: Tensor, generator: torch.Generator) -> Tensor:
    batch = clips[torch.randint(len(clips), (_BATCH,), generator=generator)]
    first = int(torch.randint(clips.shape[2] - _FRAMES + 1, (), generator=generator))
    top, left = (
        int(torch.randint((side - _CROP) // 4 + 1, (), generator=generator)) * 4
        for side in clips.shape[3:]
    )
    return batch[:, :, first : first + _FRAMES, top : top + _CROP, left : left + _CROP]
