"""The UNet of the tiny bundle, trained for about a minute to draw plain figures."""

from __future__ import annotations

import torch
from diffusers import DDIMScheduler, UNet2DConditionModel
from torch import Tensor
from torch.nn import functional

from demo.descent import descend

__all__ = ["make_denoiser", "make_scheduler", "train_denoiser"]

_WIDTHS = (32, 64)
_LEARNING_RATE = 2e-3
_BATCH = 16
_CAPTION_DROPOUT = 0.1  # as Stable Diffusion was trained, for classifier-free guidance


def make_denoiser(channels: int, cross_attention_dim: int) -> UNet2DConditionModel:
    """Return an untrained UNet on the VAE's latents with attention on both levels.

    Drawn from torch's global generator.
    """
    return UNet2DConditionModel(
        sample_size=8,
        in_channels=channels,
        out_channels=channels,
        block_out_channels=_WIDTHS,
        down_block_types=("CrossAttnDownBlock2D",) * 2,
        up_block_types=("CrossAttnUpBlock2D",) * 2,
        layers_per_block=1,
        cross_attention_dim=cross_attention_dim,
        attention_head_dim=4,
        norm_num_groups=8,
    )


def make_scheduler() -> DDIMScheduler:
    """Return the noise schedule of Stable Diffusion: 1,000 steps, `scaled_linear`.

    With v prediction, as in Stable Diffusion 2: at high noise a small error in epsilon becomes a
    large one in the picture, and a network this small makes errors. Its last step is all noise
    (Lin et al. 2023, https://arxiv.org/abs/2305.08891), so that a background may have any colour.
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


def train_denoiser(
    denoiser: UNet2DConditionModel,
    latents: Tensor,
    embeddings: Tensor,
    empty: Tensor,
    steps: int,
    generator: torch.Generator,
) -> None:
    """Train a UNet to predict the velocity of noisy latents.

    Args:
        denoiser: changed in place.
        latents: [count, channels, height, width].
        embeddings: of the captions, [count, tokens, size].
        empty: of the empty caption, [1, tokens, size].
        steps: optimizer steps.
        generator: draws batches, timesteps and noise.
    """
    scheduler = make_scheduler()

    def loss(_: int) -> Tensor:
        chosen = torch.randint(len(latents), (_BATCH,), generator=generator)
        timesteps = torch.randint(1000, (_BATCH,), generator=generator)
        noise = torch.randn((_BATCH, *latents.shape[1:]), generator=generator)
        dropped = torch.rand(_BATCH, generator=generator) < _CAPTION_DROPOUT
        captions = torch.where(dropped[:, None, None], empty, embeddings[chosen])
        noisy = scheduler.add_noise(latents[chosen], noise, timesteps)
        velocity = scheduler.get_velocity(latents[chosen], noise, timesteps)
        return functional.mse_loss(denoiser(noisy, timesteps, captions).sample, velocity)

    # Unclipped, the first steps leave weights from which the others hardly recover.
    descend(denoiser, loss, steps, name="tiny UNet", learning_rate=_LEARNING_RATE, max_norm=1.0)
