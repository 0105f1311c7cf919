"""Tiny Stable Diffusion model that draws plain figures: `data/tiny-sd`.

The folder has the layout of diffusers: `vae`, `text_encoder`, `tokenizer`, `unet` and `scheduler`
beside a `model_index.json`. Weights are float16 safetensors.
"""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from torch import Tensor
from torch.nn import functional
from transformers import CLIPTextModel

from demo.descent import crop, descend, save, train_vae
from demo.shapes import draw_scene
from demo.text import clip_encoder, clip_tokenizer, save_slow_files, train_clip

_SCENES = 6000
_SIDE = 64
_CROP = 32  # side of crops; most batches of the VAE are crops, which are four times cheaper
_CROP_SHARE = 0.75
_BATCH = 16
_CAPTION_DROPOUT = 0.1  # for classifier-free guidance; same share as Stable Diffusion's training


def write_tiny_sd(
    folder: Path,
    *,
    seed: int = 0,
    vae_steps: int = 2500,
    text_steps: int = 1000,
    unet_steps: int = 9000,
) -> None:
    """Train the model and write its folder, in about 25 minutes on one core.

    Args:
        folder: folder of the model; an existing folder is written into.
        seed: seed of weights, scenes and batches.
        vae_steps: optimizer steps of the VAE.
        text_steps: optimizer steps of the text encoder.
        unet_steps: optimizer steps of the UNet.
    """
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    dice = random.Random(seed)  # noqa: S311 - drawing, not cryptography
    count = min(_SCENES, _BATCH * max(vae_steps, unet_steps))
    scenes = [draw_scene(dice, (_SIDE, _SIDE)) for _ in range(count)]
    captions = [caption for _, caption in scenes]
    pixels = np.stack([np.asarray(picture, dtype=np.float32) for picture, _ in scenes])
    pictures = torch.from_numpy(pixels / 127.5 - 1).permute(0, 3, 1, 2).contiguous()

    autoencoder = make_autoencoder()
    _train_autoencoder(autoencoder, pictures, vae_steps, generator)

    tokenizer = clip_tokenizer(captions)
    tokens: Tensor = tokenizer([*captions, ""], padding="max_length", return_tensors="pt").input_ids
    text_encoder = clip_encoder(tokenizer)
    train_clip(text_encoder, tokens[:-1], pictures, text_steps, generator)

    torch.manual_seed(seed)
    generator.manual_seed(seed)
    denoiser = make_denoiser()
    latents, embeddings = _encode(autoencoder, pictures), _embed(text_encoder, tokens)
    _train_denoiser(denoiser, latents, embeddings, unet_steps, generator)

    pipeline = StableDiffusionPipeline(
        vae=autoencoder,
        text_encoder=text_encoder,
        tokenizer=tokenizer,
        unet=denoiser,
        scheduler=make_scheduler(),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    save(pipeline, folder)
    save_slow_files(tokenizer, folder / "tokenizer")


def make_autoencoder() -> AutoencoderKL:
    """Return an untrained VAE: 8 latent channels, 1/8 of the side."""
    return AutoencoderKL(
        block_out_channels=(8, 16, 32, 48),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        layers_per_block=1,
        latent_channels=8,  # enough to encode an edge within 8 x 8 pixels
        norm_num_groups=1,
        mid_block_add_attention=False,
        sample_size=_SIDE,
    )


def make_denoiser() -> UNet2DConditionModel:
    """Return an untrained UNet for the latents of the VAE."""
    return UNet2DConditionModel(
        sample_size=_SIDE // 8,
        in_channels=8,
        out_channels=8,
        block_out_channels=(32, 64),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        layers_per_block=1,
        cross_attention_dim=64,
        attention_head_dim=4,
        norm_num_groups=8,
    )


def make_scheduler() -> DDIMScheduler:
    """Return the noise schedule of Stable Diffusion: 1,000 steps, `scaled_linear`.

    The network predicts v, as in Stable Diffusion 2: at high noise, a small error in epsilon
    becomes a large error in the picture, and such a small network makes errors. The last step is
    pure noise (Lin et al. 2023, https://arxiv.org/abs/2305.08891), so that backgrounds can have
    any colour.
    """
    return DDIMScheduler(
        num_train_timesteps=1000,
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        prediction_type="v_prediction",
        clip_sample=False,
        set_alpha_to_one=False,
        steps_offset=1,
        rescale_betas_zero_snr=True,
        timestep_spacing="trailing",
    )


def _train_autoencoder(
    autoencoder: AutoencoderKL, pictures: Tensor, steps: int, generator: torch.Generator
) -> None:
    """Train a VAE, and set the `scaling_factor` that makes the latents' standard deviation 1.

    Source of the factor: Rombach et al. 2022, section D.1.
    """

    def batch() -> Tensor:
        chosen = pictures[torch.randint(len(pictures), (_BATCH,), generator=generator)]
        if torch.rand((), generator=generator) < _CROP_SHARE:
            return crop(chosen, _CROP, generator)
        return chosen[: _BATCH // 2]

    train_vae(autoencoder, batch, steps, name="tiny VAE", learning_rate=3e-3)
    autoencoder.register_to_config(scaling_factor=1.0)
    deviation = _encode(autoencoder, pictures[:256]).std().item()
    autoencoder.register_to_config(scaling_factor=1 / deviation)


def _encode(autoencoder: AutoencoderKL, pictures: Tensor) -> Tensor:
    """Return scaled latents [count, 8, height / 8, width / 8] of pictures from -1 to 1."""
    with torch.no_grad():
        means = [autoencoder.encode(part).latent_dist.mean for part in torch.split(pictures, 64)]
    return torch.cat(means) * float(autoencoder.config.scaling_factor)


def _embed(encoder: CLIPTextModel, tokens: Tensor) -> Tensor:
    """Return the last hidden states [count, 77, width] of the captions' tokens."""
    with torch.no_grad():
        parts = [encoder(input_ids=part).last_hidden_state for part in torch.split(tokens, 100)]
    return torch.cat(parts)


def _train_denoiser(
    denoiser: UNet2DConditionModel,
    latents: Tensor,
    embeddings: Tensor,
    steps: int,
    generator: torch.Generator,
) -> None:
    """Train a UNet to predict the velocity of noisy latents.

    Args:
        denoiser: network that is changed in place.
        latents: scaled latents, [count, channels, height, width].
        embeddings: embeddings of the captions and finally of the empty caption,
            [count + 1, tokens, size].
        steps: number of optimizer steps.
        generator: generator for batches, timesteps and noise.
    """
    scheduler = make_scheduler()

    def loss() -> Tensor:
        chosen = torch.randint(len(latents), (_BATCH,), generator=generator)
        timesteps = torch.randint(1000, (_BATCH,), generator=generator)
        noise = torch.randn((_BATCH, *latents.shape[1:]), generator=generator)
        dropped = torch.rand(_BATCH, generator=generator) < _CAPTION_DROPOUT
        captions = embeddings[torch.where(dropped, len(latents), chosen)]
        noisy = scheduler.add_noise(latents[chosen], noise, timesteps)
        velocity = scheduler.get_velocity(latents[chosen], noise, timesteps)
        return functional.mse_loss(denoiser(noisy, timesteps, captions).sample, velocity)

    descend(denoiser, loss, steps, name="tiny UNet", learning_rate=2e-3)
