"""Clips from noise, by diffusers' WanPipeline.

The noise follows from seed and size alone: the network with an adapter and the one without begin
with the same.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import ExitStack
from typing import Any, NamedTuple

import numpy as np
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler, WanPipeline
from numpy.typing import NDArray

from latentmake.caches.encoders.device import within_memory
from latentmake.caches.encoders.wan_vae import CHANNELS, WanVae
from latentmake.progress import say
from latentmake.training.loop.batch_order import seed_of
from latentmake.training.loop.caches import WAN, read_text
from latentmake.training.loop.recipe import Drawn, Sampler
from latentmake.training.wan.generation import ClipSettings
from latentmake.training.wan.network import Denoiser
from latentmake.training.wan.order import WanOrder

TEXT_TOKENS = 512
"""Tokens that Wan's network attends to; shorter texts are followed by zeros."""

_Pipeline: Any = WanPipeline  # diffusers has no types
_UniPc: Any = UniPCMultistepScheduler
_Euler: Any = FlowMatchEulerDiscreteScheduler


class Condition(NamedTuple):
    """Condition of image-to-video.

    Attributes:
        latents: mask and latents of the first frame, [20, f, h, w], as the caches have them.
        image: hidden states of the CLIP image encoder, [257, D], for Wan 2.1.
    """

    latents: torch.Tensor
    image: torch.Tensor | None = None


def noise_of(seed: int, frames: int, height: int, width: int) -> torch.Tensor:
    """Return the noise [16, f, h, w] of a clip of 4 f - 3 frames: diffusers', made on a CPU."""
    shape = CHANNELS, (frames - 1) // 4 + 1, height // 8, width // 8
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def sample_latents(
    network: Denoiser,
    text: torch.Tensor,
    negative: torch.Tensor | None,
    noise: torch.Tensor,
    settings: ClipSettings,
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
        settings: of the steps.
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
        scheduler=_schedule(settings),
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
            num_inference_steps=settings.num_inference_steps,
            guidance_scale=1.0 if negative is None else settings.guidance_scale,
            callback_on_step_end=stepped,
            output_type="latent",
        ).frames
    found: torch.Tensor = latents[0].float().cpu()
    return found


def _schedule(settings: ClipSettings) -> Any:
    shift = settings.flow_shift
    if settings.scheduler == "euler":
        return _Euler(shift=shift)
    return _UniPc(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=shift)


class ClipSampler(Sampler):
    """Draws the sample clips of a training."""

    def __init__(self, order: WanOrder) -> None:
        samples, (width, height) = order.trainer.samples, order.sample_size
        self._settings = ClipSettings(
            frames=samples.frames,
            width=width,
            height=height,
            fps=samples.fps,
            num_inference_steps=samples.num_inference_steps,
            guidance_scale=samples.guidance_scale,
            flow_shift=order.flow_shift,
        )
        self._negative = None if order.negative is None else read_text(order.negative, WAN)["text"]
        self._clips = [
            (key, read_text(prompt.text, WAN)["text"], seed_of(samples.seed, "sample", *each))
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
        settings = self._settings
        drawn: Drawn = {}
        for key, text, seed in self._clips:
            if key in keys:
                noise = noise_of(seed, settings.frames, settings.height, settings.width)
                drawn[key] = sample_latents(
                    network, text, self._negative, noise, settings, device=device, dtype=dtype
                )
        return drawn


def decode_clip(vae: WanVae, latents: torch.Tensor) -> NDArray[np.uint8] | None:
    """Decode a clip to [F, H, W, 3]; in tiles where memory does not suffice, else None."""
    frames = within_memory(vae.decode, latents)
    if frames is None:
        say("out of memory: decoding in tiles of 256 x 256 pixels")
        vae.tile()
        frames = within_memory(vae.decode, latents)
    return frames
