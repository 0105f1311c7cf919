"""Clips from noise: flow matching by UniPC or Euler steps, with classifier-free guidance.

The steps are those of diffusers' WanPipeline. UniPC: Zhao et al. 2023, https://arxiv.org/abs/2302.04867;
guidance: Ho and Salimans 2022, https://arxiv.org/abs/2207.12598. The noise follows from seed and
size alone: the network with an adapter and the one without begin with the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler
from numpy.typing import NDArray

from latentmake.caches.encoders.device import within_memory
from latentmake.caches.encoders.wan_vae import LATENTS_MEAN, WanVae

TEXT_TOKENS = 512
"""Tokens that Wan's network attends to; shorter texts are followed by zeros."""

_TIMESTEPS = 1000
_UniPc: Any = UniPCMultistepScheduler  # diffusers has no types
_Euler: Any = FlowMatchEulerDiscreteScheduler

Transformer = Any  # a WanTransformer3DModel, or what wraps one
Enter = Callable[[Transformer], None]


class Networks(NamedTuple):
    """The network, or Wan 2.2's two.

    Attributes:
        low: for low noise, and for all where there is no `high`.
        high: for high noise; does all where there is no `low`.
        boundary: share of the timesteps from which on `high` is used.
    """

    low: Transformer | None
    high: Transformer | None = None
    boundary: float = 0.0

    @property
    def all(self) -> list[Transformer]:
        """The one or two that there are."""
        return [each for each in (self.low, self.high) if each is not None]

    def at(self, timestep: float) -> Transformer:
        """Return the network for a timestep, 0 to 1000."""
        high = self.high is not None and timestep >= self.boundary * _TIMESTEPS
        return self.high if high or self.low is None else self.low


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


def noise_of(seed: int, shape: tuple[int, int, int, int]) -> torch.Tensor:
    """Return the noise of a clip of latents, float32: that of diffusers with a CPU's generator."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def padded_text(text: torch.Tensor) -> torch.Tensor:
    """Return an embedding [T, D] as the network takes it, [1, 512, D]."""
    missing = TEXT_TOKENS - len(text)
    return torch.nn.functional.pad(text[:TEXT_TOKENS], (0, 0, 0, max(0, missing)))[None]


@torch.no_grad()
def sample_latents(
    networks: Networks,
    text: torch.Tensor,
    negative: torch.Tensor | None,
    noise: torch.Tensor,
    sampling: Sampling,
    *,
    device: torch.device,
    dtype: torch.dtype,
    condition: Condition | None = None,
    enter: Enter | None = None,
    done: Callable[[], object] = lambda: None,
) -> torch.Tensor:
    """Draw the latents of one clip.

    Args:
        networks: in evaluation mode.
        text: embedding of the prompt, [T, D].
        negative: that of the negative prompt; None without guidance.
        noise: [16, f, h, w], see `noise_of`.
        sampling: settings.
        device: of the networks.
        dtype: of their input.
        condition: of image-to-video.
        enter: called with a network before it is used after another, to move it to the device.
        done: called after each step.

    Returns:
        Normalised latents [16, f, h, w], float32, on the CPU.
    """
    schedule = _schedule(sampling)
    schedule.set_timesteps(sampling.steps, device=device)
    guided = negative is not None and sampling.guidance > 1
    texts = [text] if negative is None or not guided else [text, negative]
    inputs = [padded_text(each).to(device, dtype) for each in texts]
    extra: dict[str, torch.Tensor] = {}
    fixed = None
    if condition is not None:
        fixed = condition.latents[None].to(device, dtype)
        if condition.image is not None:
            extra["encoder_hidden_states_image"] = condition.image[None].to(device, dtype)
    latents = noise[None].to(device, torch.float32)
    entered: Transformer | None = None
    for timestep in schedule.timesteps:
        network = networks.at(float(timestep))
        if enter is not None and network is not entered:
            enter(network)
        entered = network
        seen = latents.to(dtype)
        if fixed is not None:
            seen = torch.cat([seen, fixed], dim=1)
        # One after the other: half the memory of both at once, and as fast at these sizes.
        predicted = [
            network(
                hidden_states=seen,
                timestep=timestep.expand(1),
                encoder_hidden_states=each,
                return_dict=False,
                **extra,
            )[0].float()
            for each in inputs
        ]
        velocity = predicted[0]
        if guided:
            velocity = predicted[1] + sampling.guidance * (predicted[0] - predicted[1])
        latents = schedule.step(velocity, timestep, latents, return_dict=False)[0]
        done()
    return latents[0].float().cpu()


def _schedule(sampling: Sampling) -> Any:
    if sampling.scheduler == "euler":
        return _Euler(num_train_timesteps=_TIMESTEPS, shift=sampling.shift)
    return _UniPc(
        num_train_timesteps=_TIMESTEPS,
        prediction_type="flow_prediction",
        use_flow_sigmas=True,
        flow_shift=sampling.shift,
    )


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
