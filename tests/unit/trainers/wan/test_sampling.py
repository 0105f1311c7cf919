"""Clips drawn from noise equal those of diffusers' own pipeline."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import (
    AutoencoderKLWan,
    FlowMatchEulerDiscreteScheduler,
    UniPCMultistepScheduler,
    WanImageToVideoPipeline,
    WanPipeline,
)
from dit_world import tiny_dit
from latentmake.config.weights import Weights
from latentmake.encode.encoders.wan import load_wan_vae
from latentmake.trainers.loop.order import ClipSettings
from latentmake.trainers.wan.recipe import Denoiser
from latentmake.trainers.wan.sampling import FIRST_FRAME, WanPainter
from wan_world import tiny_wan_vae

CPU = torch.device("cpu")
SHAPE = (16, 2, 4, 6)
WIDTH = 24  # of the text that `tiny_dit` takes


def text(seed: int, tokens: int = 7) -> torch.Tensor:
    return torch.randn(tokens, WIDTH, generator=torch.Generator().manual_seed(100 + seed))


def padded(embedding: torch.Tensor) -> torch.Tensor:
    zeros = torch.zeros(1, 512, embedding.shape[1])
    zeros[0, : len(embedding)] = embedding
    return zeros


SCHEDULERS: dict[str, Any] = {
    "unipc": lambda shift: UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=shift
    ),
    "euler": lambda shift: FlowMatchEulerDiscreteScheduler(shift=shift),
}


def sampled(
    steps: int, guidance: float = 5.0, shift: float = 3.0, scheduler: Any = "unipc"
) -> ClipSettings:
    return ClipSettings(
        frames=5, width=48, height=32, fps=16, num_inference_steps=steps, guidance_scale=guidance,
        flow_shift=shift, scheduler=scheduler,
    )  # fmt: skip


def drawn(
    networks: Denoiser, sampling: ClipSettings, condition: Any = None, **others: Any
) -> torch.Tensor:
    painter: Any = SimpleNamespace(
        network=networks, settings=sampling, device=CPU, dtype=torch.float32
    )
    texts = [text(1), text(2, 3)]
    noise = torch.randn(SHAPE, generator=torch.Generator().manual_seed(3))
    return WanPainter.sample(painter, texts, noise, condition or {}, **others)


def by_pipeline(networks: Denoiser, sampling: ClipSettings) -> Any:
    two = {} if networks.high is None else {"boundary_ratio": networks.boundary}
    pipeline = WanPipeline(
        tokenizer=None, text_encoder=None, vae=None,
        scheduler=SCHEDULERS[sampling.scheduler](sampling.flow_shift),
        transformer=networks.low if networks.high is None else networks.high,
        transformer_2=None if networks.high is None else networks.low,
        **two,
    )  # fmt: skip
    pipeline.set_progress_bar_config(disable=True)
    return pipeline(
        prompt_embeds=padded(text(1)), negative_prompt_embeds=padded(text(2, 3)),
        height=32, width=48, num_frames=5, num_inference_steps=sampling.num_inference_steps,
        guidance_scale=sampling.guidance_scale, generator=torch.Generator().manual_seed(3),
        output_type="latent",
    ).frames[0]  # fmt: skip


@pytest.mark.parametrize(
    "sampling", [sampled(4, 1.0), sampled(3, 5.0, 3.0, "euler")], ids=["unipc", "euler"]
)
def test_latents_are_those_of_diffusers(sampling: ClipSettings) -> None:
    networks = Denoiser(tiny_dit())
    found = drawn(networks, sampling)
    assert found.shape == SHAPE
    assert torch.allclose(found, by_pipeline(networks, sampling), atol=1e-5)


def test_two_networks_take_turns_at_the_boundary_as_in_diffusers() -> None:
    networks = Denoiser(tiny_dit(), tiny_dit(num_layers=1), 0.875)
    sampling, steps = sampled(6, 4.0, 5.0), []
    found = drawn(networks, sampling, done=lambda: steps.append(0))
    assert torch.allclose(found, by_pipeline(networks, sampling), atol=1e-5)
    assert not torch.allclose(found, drawn(Denoiser(networks.low), sampling), atol=1e-3)
    assert len(steps) == 6


def test_a_decoded_clip_is_near_the_clip_that_was_encoded(tmp_path: Path) -> None:
    """Normalising and its inverse cancel: the decoder sees what the encoder gave."""
    tiny_wan_vae().save_pretrained(tmp_path / "vae")
    place = Weights(path=str(tmp_path / "vae"))
    clip = torch.randint(0, 256, (1, 5, 32, 48, 3), generator=torch.Generator().manual_seed(0))
    latents = load_wan_vae(place, CPU, torch.float32).encode(clip.byte(), torch.float32)[0]
    found = load_wan_vae(place, CPU, torch.float32, decoder=True).decode(latents)
    whole = AutoencoderKLWan.from_pretrained(tmp_path / "vae").eval()
    with torch.no_grad():
        signal = clip.permute(0, 4, 1, 2, 3) / 127.5 - 1
        expected = whole.decode(whole.encode(signal).latent_dist.mode()).sample[0]
    values = ((expected.permute(1, 2, 3, 0) + 1) * 127.5).clamp(0, 255).numpy()
    assert np.abs(found - values).max() <= 0.51


def test_a_condition_of_image_to_video_is_that_of_diffusers(tmp_path: Path) -> None:
    vae = tiny_wan_vae()
    network = tiny_dit(in_channels=36)
    sampling = sampled(3, 4.0)
    pixels = torch.randint(0, 256, (1, 5, 32, 48, 3), generator=torch.Generator().manual_seed(0))
    pipeline = WanImageToVideoPipeline(
        tokenizer=None, text_encoder=None, image_encoder=None, image_processor=None, vae=vae,
        scheduler=SCHEDULERS["unipc"](3.0), transformer=network,
    )  # fmt: skip
    pipeline.set_progress_bar_config(disable=True)
    expected = pipeline(
        image=pixels[0, 0].permute(2, 0, 1)[None] / 255,
        prompt_embeds=padded(text(1)), negative_prompt_embeds=padded(text(2, 3)),
        height=32, width=48, num_frames=5, num_inference_steps=3, guidance_scale=4.0,
        generator=torch.Generator().manual_seed(3), output_type="latent",
    ).frames[0]  # fmt: skip
    vae.save_pretrained(tmp_path / "vae")
    encoder = load_wan_vae(Weights(path=str(tmp_path / "vae")), CPU, torch.float32)
    latents = encoder.encode_first_frame(pixels.byte(), torch.float32)[0]
    found = drawn(Denoiser(network), sampling, condition={FIRST_FRAME: latents[None]})
    assert torch.allclose(found, expected, atol=1e-4)
