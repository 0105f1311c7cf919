"""The transformer of the tiny Wan bundle, trained for a few seconds on scenes in motion.

It is left undertrained on purpose: a short fine-tune must lower the loss visibly.
"""

from __future__ import annotations

import torch
from diffusers import UniPCMultistepScheduler, WanTransformer3DModel
from latentmake.progress import Progress
from torch import Tensor
from torch.nn import functional

__all__ = ["FLOW_SHIFT", "make_wan_denoiser", "make_wan_scheduler", "train_wan_denoiser"]

FLOW_SHIFT = 3.0
_CHANNELS = 16
_HEADS = 4
_HEAD_SIZE = 24
_LEARNING_RATE = 3e-3
_BATCH = 8
_CAPTION_DROPOUT = 0.1  # for classifier-free guidance


def make_wan_denoiser(text_dim: int) -> WanTransformer3DModel:
    """Return an untrained network of Wan's text-to-video kind, 96 wide, of 4 blocks.

    Drawn from torch's global generator.
    """
    return WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=_HEADS,
        attention_head_dim=_HEAD_SIZE,
        in_channels=_CHANNELS,
        out_channels=_CHANNELS,
        text_dim=text_dim,
        freq_dim=64,
        ffn_dim=2 * _HEADS * _HEAD_SIZE,
        num_layers=4,
        cross_attn_norm=True,
        qk_norm="rms_norm_across_heads",
    )


def make_wan_scheduler() -> UniPCMultistepScheduler:
    """Return the scheduler of Wan's own pipelines: flow matching with shifted sigmas."""
    return UniPCMultistepScheduler(
        prediction_type="flow_prediction",
        use_flow_sigmas=True,
        num_train_timesteps=1000,
        flow_shift=FLOW_SHIFT,
    )


def train_wan_denoiser(
    denoiser: WanTransformer3DModel,
    latents: Tensor,
    embeddings: Tensor,
    empty: Tensor,
    steps: int,
    generator: torch.Generator,
) -> None:
    """Train a network to predict the velocity, noise minus latents, at shifted timesteps.

    Args:
        denoiser: changed in place.
        latents: normalized, [count, 16, frames, height, width].
        embeddings: of the captions, zeros behind their tokens, [count, tokens, size].
        empty: of the empty caption, [1, tokens, size].
        steps: optimizer steps.
        generator: draws batches, timesteps and noise.
    """
    optimizer = torch.optim.AdamW(
        denoiser.parameters(), lr=_LEARNING_RATE, weight_decay=0, fused=True
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / 10) * max(0.05, 1 - step / max(1, steps))
    )
    denoiser.train()
    for _ in Progress(range(steps), desc="tiny Wan transformer", unit="step"):
        chosen = torch.randint(len(latents), (_BATCH,), generator=generator)
        uniform = torch.rand(_BATCH, generator=generator)
        sigmas = FLOW_SHIFT * uniform / (1 + (FLOW_SHIFT - 1) * uniform)
        noise = torch.randn((_BATCH, *latents.shape[1:]), generator=generator)
        dropped = torch.rand(_BATCH, generator=generator) < _CAPTION_DROPOUT
        captions = torch.where(dropped[:, None, None], empty, embeddings[chosen])
        share = sigmas[:, None, None, None, None]
        noisy = (1 - share) * latents[chosen] + share * noise
        velocity = noise - latents[chosen]
        loss = functional.mse_loss(denoiser(noisy, 1000 * sigmas, captions).sample, velocity)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(denoiser.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    denoiser.eval()
