"""Tiny Wan 2.1 model that shows plain figures in motion: `data/tiny-wan`.

The folder has the layout of diffusers' text-to-video pipeline: `vae`, `text_encoder`, `tokenizer`,
`transformer` and `scheduler` beside a `model_index.json`. Weights are float16 safetensors.
"""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import (
    AutoencoderKLWan,
    UniPCMultistepScheduler,
    WanPipeline,
    WanTransformer3DModel,
)
from diffusers.models.transformers.transformer_wan import WanAttnProcessor
from torch import Tensor
from torch.nn import functional
from transformers import T5Tokenizer, UMT5EncoderModel

from demo.descent import crop, descend, save, train_vae
from demo.motion import draw_motion
from demo.text import HIDDEN_SIZE, t5_tokenizer, umt5_encoder

_SCENES = 360
_SIZE = (96, 64)
_FRAMES = 9
_CROP = 32  # side of crops; the VAE is trained only on crops of 5 frames, which are cheaper
_CROPPED_FRAMES = 5
_MEASURED = 32  # number of clips for the statistics of the latents
_FLOW_SHIFT = 2.0  # Wan uses 3; with so few latents, less noise is enough to hide the content
_TOKENS = 512  # Wan's pipelines pad every caption with zeros to this length
_LATENTS = 16
_CAPTION_DROPOUT = 0.1  # for classifier-free guidance


def write_tiny_wan(
    folder: Path, *, seed: int = 0, vae_steps: int = 1200, transformer_steps: int = 2500
) -> None:
    """Train the model and write its folder, in about 12 minutes on one core.

    The training stops early on purpose: a short fine-tune must lower the loss visibly.

    Args:
        folder: folder of the model; an existing folder is written into.
        seed: seed of weights, scenes and batches.
        vae_steps: optimizer steps of the VAE.
        transformer_steps: optimizer steps of the transformer.
    """
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    dice = random.Random(seed)  # noqa: S311 - drawing, not cryptography
    count = min(_SCENES, 8 * max(vae_steps, transformer_steps))
    scenes = [draw_motion(dice, _SIZE, _FRAMES) for _ in range(count)]
    captions = [caption for _, caption in scenes]
    pixels = torch.from_numpy(np.stack([clip for clip, _ in scenes]).astype(np.float32))
    clips = (pixels / 127.5 - 1).permute(0, 4, 1, 2, 3).contiguous()

    autoencoder = AutoencoderKLWan(base_dim=6, z_dim=_LATENTS, num_res_blocks=1)
    _train_autoencoder(autoencoder, clips, vae_steps, generator)

    tokenizer = t5_tokenizer(captions)
    text_encoder = umt5_encoder(tokenizer)
    denoiser = WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=4,
        attention_head_dim=32,
        in_channels=_LATENTS,
        out_channels=_LATENTS,
        text_dim=HIDDEN_SIZE,
        freq_dim=64,
        ffn_dim=256,
        num_layers=3,
        cross_attn_norm=True,
        qk_norm="rms_norm_across_heads",
    )
    latents = _encode(autoencoder, clips)
    embeddings = _embed(text_encoder, tokenizer, [*captions, ""])
    _train_denoiser(denoiser, latents, embeddings, transformer_steps, generator)
    scheduler = UniPCMultistepScheduler(
        prediction_type="flow_prediction",
        use_flow_sigmas=True,
        num_train_timesteps=1000,
        flow_shift=_FLOW_SHIFT,
    )
    pipeline = WanPipeline(
        tokenizer=tokenizer,
        text_encoder=text_encoder,
        vae=autoencoder,
        transformer=denoiser,
        scheduler=scheduler,
    )
    save(pipeline, folder)


def _train_autoencoder(
    autoencoder: AutoencoderKLWan, clips: Tensor, steps: int, generator: torch.Generator
) -> None:
    """Train a VAE on clips [count, 3, frames, height, width], then `_normalize` its latents."""

    def batch() -> Tensor:
        chosen = clips[torch.randint(len(clips), (4,), generator=generator)]
        first = int(torch.randint(_FRAMES - _CROPPED_FRAMES + 1, (), generator=generator))
        return crop(chosen[:, :, first : first + _CROPPED_FRAMES], _CROP, generator)

    train_vae(autoencoder, batch, steps, name="tiny Wan VAE", learning_rate=2e-3)
    _normalize(autoencoder, clips[:_MEASURED])


def _normalize(autoencoder: AutoencoderKLWan, clips: Tensor) -> None:
    """Adjust the VAE's outermost layers so that latents have the statistics of Wan's configuration.

    All channels have one factor, like the scaling factor of Stable Diffusion. So a channel with
    little information stays small after normalization.
    """
    mean, deviation = _statistics(autoencoder)
    inner, outer = autoencoder.quant_conv, autoencoder.post_quant_conv
    with torch.no_grad():
        latents = autoencoder.encode(clips).latent_dist.mean.transpose(0, 1).flatten(1)
        middle = latents.mean(dim=1)
        factor = deviation / (latents - middle[:, None]).std()
        inner.weight[:_LATENTS] *= factor[:, None, None, None, None]
        inner.bias[:_LATENTS] = (inner.bias[:_LATENTS] - middle) * factor + mean
        outer.bias += outer.weight[:, :, 0, 0, 0] @ (middle - mean / factor)
        outer.weight /= factor[None, :, None, None, None]


def _statistics(autoencoder: AutoencoderKLWan) -> tuple[Tensor, Tensor]:
    config = autoencoder.config
    return torch.tensor(config.latents_mean), torch.tensor(config.latents_std)


def _encode(autoencoder: AutoencoderKLWan, clips: Tensor) -> Tensor:
    """Return normalized latents [count, 16, frames / 4 + 1, height / 8, width / 8] of clips."""
    mean, deviation = (values[:, None, None, None] for values in _statistics(autoencoder))
    with torch.no_grad():
        parts = [autoencoder.encode(part).latent_dist.mean for part in torch.split(clips, 16)]
    return (torch.cat(parts) - mean) / deviation


def _embed(encoder: UMT5EncoderModel, tokenizer: T5Tokenizer, captions: list[str]) -> Tensor:
    """Return the last hidden states [count, tokens, `HIDDEN_SIZE`] of captions.

    Each caption is padded with zeros, with at least one row of them.
    """
    with torch.no_grad():
        states = [
            encoder(input_ids=tokenizer(caption, return_tensors="pt").input_ids).last_hidden_state
            for caption in captions
        ]
    longest = max(state.shape[1] for state in states)
    padded = torch.zeros(len(captions), 1 + longest, HIDDEN_SIZE)
    for row, state in zip(padded, states, strict=True):
        row[: state.shape[1]] = state[0]
    return padded


def _train_denoiser(
    denoiser: WanTransformer3DModel,
    latents: Tensor,
    embeddings: Tensor,
    steps: int,
    generator: torch.Generator,
) -> None:
    """Train a network to predict the velocity, noise minus latents, at shifted timesteps.

    Args:
        denoiser: network that is changed in place.
        latents: normalized latents, [count, 16, frames, height, width].
        embeddings: embeddings of the captions, then of the empty caption; see `_embed`.
        steps: number of optimizer steps.
        generator: generator for batches, timesteps and noise.
    """

    def loss() -> Tensor:
        chosen = torch.randint(len(latents), (8,), generator=generator)
        uniform = torch.rand(8, generator=generator)
        sigmas = _FLOW_SHIFT * uniform / (1 + (_FLOW_SHIFT - 1) * uniform)
        noise = torch.randn((8, *latents.shape[1:]), generator=generator)
        dropped = torch.rand(8, generator=generator) < _CAPTION_DROPOUT
        captions = embeddings[torch.where(dropped, len(latents), chosen)]
        share = sigmas[:, None, None, None, None]
        noisy = (1 - share) * latents[chosen] + share * noise
        velocity = noise - latents[chosen]
        return functional.mse_loss(denoiser(noisy, 1000 * sigmas, captions).sample, velocity)

    for block in denoiser.blocks:
        block.attn2.set_processor(PaddedAttention())
    descend(denoiser, loss, steps, name="tiny Wan transformer", learning_rate=3e-3)
    for block in denoiser.blocks:
        block.attn2.set_processor(WanAttnProcessor())


class PaddedAttention(WanAttnProcessor):  # type: ignore[misc]
    """Attention to a caption whose last token stands for all padding up to `_TOKENS`.

    All padding tokens have the same keys and values. One token has the same effect as all of them
    if its logit is larger by the logarithm of their number. Otherwise so small a network would
    spend most of its time on the padding.
    """

    def __call__(self, attn: Any, hidden: Tensor, text: Tensor, *others: Any) -> Tensor:
        """Attend like `WanAttnProcessor` of diffusers; the first of `others`, the mask, is None."""
        mask = torch.zeros(1, 1, 1, text.shape[1])
        mask[..., -1] = math.log(_TOKENS - text.shape[1] + 1)
        attended: Tensor = super().__call__(attn, hidden, text, mask, *others[1:])
        return attended
