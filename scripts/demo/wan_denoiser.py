"""The transformer of the tiny Wan bundle, trained for half a minute on scenes in motion.

It starts by passing its input on, as most of a velocity is noise that is to be seen there. It is
left undertrained: a short fine-tune must lower the loss visibly.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from diffusers import UniPCMultistepScheduler, WanTransformer3DModel
from diffusers.models.transformers.transformer_wan import WanAttnProcessor
from torch import Tensor
from torch.nn import functional

from demo.descent import descend

__all__ = [
    "FLOW_SHIFT",
    "TOKENS",
    "PaddedAttention",
    "make_wan_denoiser",
    "make_wan_scheduler",
    "train_wan_denoiser",
]

FLOW_SHIFT = 2.0  # so few latents are hidden by less noise than the shift of 3 of the real one
TOKENS = 512  # Wan's pipelines fill every caption with zeros to this length
_CHANNELS = 16
_HEADS = 4
_HEAD_SIZE = 32
_BRANCHES = 0.3  # how much of the ordinary initial weights the ends of branches keep
_LEARNING_RATE = 4e-3
_BATCH = 8
_CAPTION_DROPOUT = 0.1  # for classifier-free guidance


def make_wan_denoiser(text_dim: int) -> WanTransformer3DModel:
    """Return an untrained network of Wan's text-to-video kind, 128 wide, of 4 blocks.

    Drawn from torch's global generator.
    """
    denoiser = WanTransformer3DModel(
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
    with torch.no_grad():
        _start_as_identity(denoiser)
    return denoiser


def _start_as_identity(denoiser: WanTransformer3DModel) -> None:
    """Let patches go in by an orthogonal matrix and out by its transpose."""
    entry, end = denoiser.patch_embedding, denoiser.proj_out
    matrix = torch.nn.init.orthogonal_(torch.empty(entry.weight.shape[0], end.out_features))
    entry.weight.copy_(matrix.view_as(entry.weight))  # [width, channels, 1, 2, 2]
    entry.bias.zero_()
    # The last layer has the channels of a patch behind its places.
    ordered = matrix.view_as(entry.weight).permute(0, 2, 3, 4, 1).flatten(1)
    end.weight.copy_(ordered.T * math.sqrt(end.out_features / end.in_features))
    end.bias.zero_()
    for block in denoiser.blocks:
        for last in (block.attn1.to_out[0], block.attn2.to_out[0], block.ffn.net[2]):
            last.weight *= _BRANCHES
            last.bias.zero_()


class PaddedAttention:
    """Attention to a caption whose last token stands for all zeros that fill it to `TOKENS`.

    Equal keys and values count together as one whose logit is larger by the logarithm of their
    number; most of the time of so small a network would go to them otherwise.
    """

    def __init__(self) -> None:
        self._attend = WanAttnProcessor()

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        rotary_emb: Any = None,
    ) -> Tensor:
        """Attend as diffusers' own, see its `WanAttnProcessor`."""
        assert encoder_hidden_states is not None
        count = encoder_hidden_states.shape[1]
        more = torch.zeros(1, 1, 1, count)
        more[..., -1] = math.log(TOKENS - count + 1)
        attended: Tensor = self._attend(
            attn, hidden_states, encoder_hidden_states, more, rotary_emb
        )
        return attended


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
        embeddings: of the captions, [count, tokens, size], with at least one row of zeros each.
        empty: of the empty caption, [1, tokens, size].
        steps: optimizer steps.
        generator: draws batches, timesteps and noise.
    """

    def loss(_: int) -> Tensor:
        chosen = torch.randint(len(latents), (_BATCH,), generator=generator)
        uniform = torch.rand(_BATCH, generator=generator)
        sigmas = FLOW_SHIFT * uniform / (1 + (FLOW_SHIFT - 1) * uniform)
        noise = torch.randn((_BATCH, *latents.shape[1:]), generator=generator)
        dropped = torch.rand(_BATCH, generator=generator) < _CAPTION_DROPOUT
        captions = torch.where(dropped[:, None, None], empty, embeddings[chosen])
        share = sigmas[:, None, None, None, None]
        noisy = (1 - share) * latents[chosen] + share * noise
        velocity = noise - latents[chosen]
        return functional.mse_loss(denoiser(noisy, 1000 * sigmas, captions).sample, velocity)

    for block in denoiser.blocks:
        block.attn2.set_processor(PaddedAttention())
    descend(
        denoiser,
        loss,
        steps,
        name="tiny Wan transformer",
        learning_rate=_LEARNING_RATE,
        max_norm=1.0,
    )
    for block in denoiser.blocks:
        block.attn2.set_processor(WanAttnProcessor())
