"""Clips from noise, by diffusers' WanPipeline.

The noise follows from seed and size alone: the network with an adapter and the one without begin
with the same.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import ExitStack
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler, WanPipeline
from numpy.typing import NDArray

from latentmake.caches.encoders.device import within_memory
from latentmake.caches.encoders.wan_vae import LATENTS_MEAN, WanVae
from latentmake.training.loop.batch_order import seed_of
from latentmake.training.loop.data.caches import WAN, read_text
from latentmake.training.loop.recipe import Drawn, Sampler
from latentmake.training.wan.denoiser import Denoiser
from latentmake.training.wan.order import WanOrder

TEXT_TOKENS = 512
"""Tokens that Wan's network attends to; shorter texts are followed by zeros."""

_Pipeline: Any = WanPipeline  # diffusers has no types
_UniPc: Any = UniPCMultistepScheduler
_Euler: Any = FlowMatchEulerDiscreteScheduler


class Sampling(NamedTuple):
    """Settings of the steps from noise to latents; a `guidance` of 1 is none."""

    steps: int = 50
    guidance: float = 5.0
    shift: float = 3.0
    scheduler: Literal["unipc", "euler"] = "unipc"


class Condition(NamedTuple):
    """Condition of image-to-video.

    Attributes:
        latents: mask and latents of the first frame, [20, f, h, w], as the caches have them.
        image: hidden states of the CLIP image encoder, [257, D], for Wan 2.1.
    """

    latents: torch.Tensor
    image: torch.Tensor | None = None


def latents_shape(frames: int, width: int, height: int) -> tuple[int, int, int, int]:
    """Return the shape of a clip's latents, [16, f, h, w], of 4 f - 3 frames and its pixels."""
    return len(LATENTS_MEAN), (frames - 1) // 4 + 1, height // 8, width // 8


def noise_of(seed: int, shape: tuple[int, ...]) -> torch.Tensor:
    """Return the noise of a clip of latents, float32: that of diffusers with a CPU's generator."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def sample_latents(
    network: Denoiser,
    text: torch.Tensor,
    negative: torch.Tensor | None,
    noise: torch.Tensor,
    sampling: Sampling,
    *,
    device: torch.device,
    dtype: torch.dtype,
    condition: Condition | None = None,
    done: Callable[[], object] = lambda: None,
) -> torch.Tensor:
    """Draw the latents of one clip.

    Args:
        network: in evaluation mode.
        text: embedding of the prompt, [T, D].
        negative: that of the negative prompt; None without guidance.
        noise: [16, f, h, w], see `noise_of`.
        sampling: settings.
        device: of the network.
        dtype: of its input.
        condition: of image-to-video.
        done: called after each step.

    Returns:
        Normalised latents [16, f, h, w], float32, on the CPU.
    """

    def padded(embedding: torch.Tensor) -> torch.Tensor:
        kept = embedding[None, :TEXT_TOKENS].to(device, dtype)
        return torch.nn.functional.pad(kept, (0, 0, 0, TEXT_TOKENS - kept.shape[1]))

    def conditioned(_module: object, args: Any, inputs: dict[str, Any]) -> Any:
        assert condition is not None
        first, seen = condition.latents[None].to(device, dtype), condition.image
        inputs["hidden_states"] = torch.cat([inputs["hidden_states"], first], dim=1)
        if seen is not None:
            inputs["encoder_hidden_states_image"] = seen[None].to(device, dtype)
        return args, inputs

    def stepped(*_: object) -> dict[str, torch.Tensor]:
        done()
        return {}

    networks = [each for each in (network.high, network.low) if each is not None]
    pipeline = _Pipeline(
        tokenizer=None,
        text_encoder=None,
        vae=None,
        scheduler=_schedule(sampling),
        transformer=networks[0],
        transformer_2=networks[1] if len(networks) > 1 else None,
        boundary_ratio=network.boundary if len(networks) > 1 else None,
    )
    pipeline.set_progress_bar_config(disable=True)
    with ExitStack() as hooks:
        for each in networks:
            if condition is not None:
                hook = each.register_forward_pre_hook(conditioned, with_kwargs=True)
                hooks.enter_context(hook)
            # Guidance and steps are float32, whatever the network computes in.
            hook = each.register_forward_hook(lambda module, args, found: (found[0].float(),))
            hooks.enter_context(hook)
        latents = pipeline(
            prompt_embeds=padded(text),
            negative_prompt_embeds=None if negative is None else padded(negative),
            latents=noise[None],
            num_inference_steps=sampling.steps,
            guidance_scale=1.0 if negative is None else sampling.guidance,
            callback_on_step_end=stepped,
            output_type="latent",
        ).frames
    found: torch.Tensor = latents[0].float().cpu()
    return found


def _schedule(sampling: Sampling) -> Any:
    if sampling.scheduler == "euler":
        return _Euler(shift=sampling.shift)
    return _UniPc(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=sampling.shift
    )


class ClipSampler(Sampler):
    """Draws the sample clips of a training."""

    def __init__(self, order: WanOrder) -> None:
        samples, (width, height) = order.trainer.samples, order.sample_size
        self._shape = latents_shape(samples.frames, width, height)
        self._settings = Sampling(
            samples.num_inference_steps, samples.guidance_scale, order.flow_shift
        )
        self._negative = None if order.negative is None else read_text(order.negative, WAN.text)
        self._clips = [
            (key, read_text(prompt.text, WAN.text), seed_of(samples.seed, "sample", *each))
            for key, prompt, each in zip(
                order.picture_keys(), order.prompts, order.occurrences(), strict=True
            )
        ]

    def draw(
        self,
        network: Denoiser,
        keys: Collection[str],
        *,
        device: torch.device,
        dtype: torch.dtype,
    ) -> Drawn:
        """Draw the clips of these keys; float32, on the CPU."""
        drawn: Drawn = {}
        for key, text, seed in self._clips:
            if key in keys:
                noise = noise_of(seed, self._shape)
                drawn[key] = sample_latents(
                    network, text, self._negative, noise, self._settings, device=device, dtype=dtype
                )
        return drawn


def decode_clip(
    vae: WanVae, latents: torch.Tensor, say: Callable[[str], object]
) -> NDArray[np.uint8] | None:
    """Decode a clip to [F, H, W, 3]; in tiles where memory does not suffice, else None."""
    frames = within_memory(vae.decode, latents)
    if frames is None:
        say("out of memory: decoding in tiles of 256 x 256 pixels")
        vae.tile()
        frames = within_memory(vae.decode, latents)
    return frames
