"""Sample clips of a training as latents."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from latentmake.training.loop.batch_order import seed_of
from latentmake.training.loop.data.headers import Stored, read_text
from latentmake.training.loop.data.tensors import WAN
from latentmake.training.loop.recipe import Drawn, Sampler
from latentmake.training.wan.denoiser import Denoiser
from latentmake.training.wan.order import WanOrder
from latentmake.training.wan.sampling import Sampling, latents_shape, noise_of, sample_latents


class _Clip(NamedTuple):
    """A clip to draw: its key, the embedding [tokens, width] of its prompt, its noise's seed."""

    key: str
    text: torch.Tensor
    seed: int


@dataclass(frozen=True)
class ClipSampler(Sampler):
    """Settings and embeddings of sample clips.

    Attributes:
        negative: embedding that guidance leads away from; None for no guidance.
        shape: channels, frames, height and width of a clip's latents.
    """

    clips: Sequence[_Clip]
    negative: torch.Tensor | None
    shape: tuple[int, int, int, int]
    settings: Sampling

    def draw(
        self,
        network: Denoiser,
        keys: Collection[str],
        *,
        device: torch.device,
        dtype: torch.dtype,
    ) -> Drawn:
        """Draw the clips of these keys; float32, on the CPU."""
        return {
            clip.key: sample_latents(
                network,
                clip.text,
                self.negative,
                noise_of(clip.seed, self.shape),
                self.settings,
                device=device,
                dtype=dtype,
            )
            for clip in self.clips
            if clip.key in keys
        }


def make_sampler(order: WanOrder, latents: Stored) -> ClipSampler:
    """Return the sampler of a training, whose `latents` have these channels."""
    samples, (width, height) = order.trainer.samples, order.sample_size
    return ClipSampler(
        [
            _Clip(key, read_text(prompt.text, WAN.text), seed_of(samples.seed, "sample", *each))
            for key, prompt, each in zip(
                order.picture_keys(), order.prompts, order.occurrences(), strict=True
            )
        ],
        None if order.negative is None else read_text(order.negative, WAN.text),
        latents_shape(samples.frames, width, height),
        Sampling(samples.num_inference_steps, samples.guidance_scale, order.flow_shift),
    )
