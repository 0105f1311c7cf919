"""Recipe of the trainer `wan`: LoRAs of Wan's networks, flow matching, clips from noise.

A share s of the noise is drawn (uniform, or the sigmoid of a normal number: Esser et
al. 2024, section 3.1, https://arxiv.org/abs/2403.03206) and shifted to shift s / (1 + (shift - 1)
s), as diffusers' FlowMatchEulerDiscreteScheduler and musubi-tuner's `--timestep_sampling shift` do;
the network sees 1000 s.

The noise follows from seed and size alone: the network with an adapter and the one without begin
with the same.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Collection
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler, WanPipeline
from numpy.typing import NDArray

from latentmake.caches.encoders.device import within_memory
from latentmake.caches.encoders.wan_vae import CHANNELS, WanVae, load_wan_vae
from latentmake.errors import ModelError, TrainingError
from latentmake.files import atomic
from latentmake.files.video import write_mp4
from latentmake.progress import say
from latentmake.training.loop import recipe as loop
from latentmake.training.loop.caches import WAN, Batch, Sought, copied, read_text
from latentmake.training.loop.recipe import Drawn, Recipe, seed_of, set_up
from latentmake.training.lora import begin_lora
from latentmake.training.wan.dit import PLACES, WanOrder, lora_names
from latentmake.training.wan.generation import ClipSettings
from latentmake.training.wan.network import (
    Denoiser,
    Transformer,
    add_lora,
    load_transformer,
    read_lora,
    write_lora,
)

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


class ClipSampler:
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


FIRST_FRAME = "latents_image"
CLIP = "clip"
"""Names of image-to-video's tensors in a batch: mask and latents of the first frame [batch, 20,
frames, height, width], and the CLIP image encoder's hidden states [batch, tokens, width]."""

_LEAST = 1e-5  # of a share: a normal number is infinite at 0 and 1


class Objective(loop.Objective):
    """Noise, timesteps and losses of a training.

    Args:
        shift: of the timesteps.
        sampling: distribution before the shift.
        boundary: share of the timesteps at which Wan 2.2 changes its network; None for one network.
        low: whether the network for low noise (or the only one) is trained.
        high: whether that for high noise is.

    Raises:
        TrainingError: a network would have no timesteps.
    """

    def __init__(
        self,
        shift: float,
        sampling: Literal["logit_normal", "uniform"] = "logit_normal",
        *,
        boundary: float | None = None,
        low: bool = True,
        high: bool = False,
    ) -> None:
        self.shift = shift
        self._boundary = boundary
        self._normal = sampling == "logit_normal"
        split = 1.0 if boundary is None else self.quantile(boundary)
        # Ranges of quantiles: a number drawn in one of them gives a timestep of that network.
        self.ranges = [
            each for each, trained in (((0.0, split), low), ((split, 1.0), high)) if trained
        ]
        if any(stop - start < _LEAST for start, stop in self.ranges):
            raise TrainingError(
                f"a shift of {shift:g} leaves no timesteps on one side of {boundary}",
                where="trainer.flow_shift",
                hint="leave it out, or train the other network alone",
            )

    def quantile(self, share: float) -> float:
        """Return the probability of a shifted share below this one."""
        plain = torch.tensor(share / (self.shift - (self.shift - 1) * share), dtype=torch.float64)
        return float(torch.special.ndtr(torch.logit(plain)) if self._normal else plain)

    def shares(self, quantiles: torch.Tensor) -> torch.Tensor:
        """Return the shifted shares of noise [batch] at quantiles [batch] of their distribution."""
        plain = quantiles.double().clamp(_LEAST, 1 - _LEAST)
        if self._normal:
            plain = torch.special.ndtri(plain).sigmoid()
        return self.shift * plain / (1 + (self.shift - 1) * plain)

    def at(self, shares: torch.Tensor) -> torch.Tensor:
        """Return timesteps [batch], float32, at quantiles over the ranges that are trained."""
        total = sum(stop - start for start, stop in self.ranges)
        places = shares.double() * total
        quantiles = torch.zeros_like(places)
        for start, stop in self.ranges:
            inside = places >= 0
            quantiles = torch.where(inside, start + places, quantiles)
            places = places - (stop - start)
        return self._timesteps(quantiles)

    def _timesteps(self, quantiles: torch.Tensor) -> torch.Tensor:
        return (self.shares(quantiles) * self.timesteps).float()

    def draw(self, shape: torch.Size, random: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw noise of this shape, and timesteps of one network for a micro-batch.

        Of two networks each comes as often as its range of timesteps does.

        Args:
            shape: of the batch's latents, [batch, channels, frames, height, width].
            random: generator on the CPU.
        """
        noise = torch.randn(shape, generator=random)
        start, stop = self.ranges[0]
        if len(self.ranges) > 1:
            first = (stop - start) / sum(end - begin for begin, end in self.ranges)
            if float(torch.rand((), generator=random, dtype=torch.float64)) >= first:
                start, stop = self.ranges[1]
        drawn = torch.rand(shape[:1], generator=random, dtype=torch.float64)
        return noise, self._timesteps(start + (stop - start) * drawn)

    def predict(
        self,
        network: Any,
        batch: Batch,
        noisy: torch.Tensor,
        timesteps: torch.Tensor,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        """Return the network's velocity."""
        inputs = inputs_of(batch, noisy, timesteps, device=noisy.device, dtype=dtype)
        if self._boundary is not None:  # asked of the device, it would make the CPU wait
            inputs["high"] = (timesteps >= self._boundary * self.timesteps).tolist()
        predicted: torch.Tensor = network(**inputs)[0]
        return predicted


def inputs_of(
    batch: Batch,
    noisy: torch.Tensor,
    timesteps: torch.Tensor,
    *,
    device: torch.device,
    dtype: torch.dtype,
) -> dict[str, Any]:
    """Return the arguments of Wan's network, as diffusers' WanPipeline and its like call it.

    Text is followed by zeros, without a mask. Image-to-video's first frame comes behind the noisy
    latents, in their channels.

    Args:
        batch: of examples.
        noisy: latents, [batch, channels, frames, height, width].
        timesteps: [batch].
        device: of the network.
        dtype: of its inputs.
    """
    hidden = noisy.to(dtype)
    if FIRST_FRAME in batch.more:
        hidden = torch.cat([hidden, copied(batch.more[FIRST_FRAME], device, dtype)], dim=1)
    text = copied(batch.text, device, dtype)[:, :TEXT_TOKENS]
    text = torch.nn.functional.pad(text, (0, 0, 0, TEXT_TOKENS - text.shape[1]))
    seen = batch.more.get(CLIP)
    return {
        "hidden_states": hidden,
        "timestep": copied(timesteps, device),
        "encoder_hidden_states": text,
        "encoder_hidden_states_image": None if seen is None else copied(seen, device, dtype),
        "return_dict": False,
    }


class WanRecipe(Recipe):
    """Recipe of the trainer `wan`."""

    results = (*lora_names(), *lora_names(high_noise=True))
    probes = 16  # each may take seconds
    rate = "items_per_second"
    order: WanOrder

    def __init__(self, order: WanOrder) -> None:
        super().__init__(order)
        settings = order.trainer
        self.alpha = float(settings.alpha or settings.rank)
        self.several = None not in (order.dit, order.dit_high_noise)
        first = (Sought(FIRST_FRAME, 4),) if order.image_to_video else ()
        clip = (Sought(CLIP, 2),) if order.needs_clip else ()
        self.tensors = WAN._replace(more=(*first, *clip))

    def make_objective(self) -> Objective:
        """Return noise, shifted timesteps and the velocity's loss."""
        order = self.order
        return Objective(
            order.flow_shift,
            order.trainer.timestep_sampling,
            boundary=order.boundary,
            low=order.dit is not None,
            high=order.dit_high_noise is not None,
        )

    def make_network(self, *, channels: int, text_width: int, dtype: torch.dtype) -> Denoiser:
        """Return the networks with new LoRAs."""
        order, settings = self.order, self.order.trainer
        torch.manual_seed(seed_of(settings.seed, "network"))
        networks: list[Transformer | None] = []
        files = iter(order.init_files)
        for path in (order.dit, order.dit_high_noise):
            transformer = None
            if path is not None:
                transformer = load_transformer(path, dtype=dtype)
                _check(transformer, channels, text_width, path)
                add_lora(
                    transformer,
                    rank=settings.rank,
                    alpha=settings.alpha,
                    target_modules=settings.target_modules,
                    autocast=dtype != torch.float32,
                    dropout=settings.lora_dropout,
                )
                if (file := next(files, None)) is not None:
                    begin_lora(transformer, file, PLACES)
                if settings.gradient_checkpointing:
                    transformer.enable_gradient_checkpointing()
            networks.append(transformer)
        set_up(settings)
        low, high = networks
        return Denoiser(low, high, 1.0 if order.boundary is None else order.boundary)

    def make_sampler(self, objective: object, latents: object) -> ClipSampler:
        """Return the sampler of clips."""
        return ClipSampler(self.order)

    def make_decoder(self, device: torch.device) -> Callable[[torch.Tensor], bytes | None]:
        """Load the VAE; return what makes an MP4 of a clip's latents."""
        vae = load_wan_vae(self.order.vae, device, torch.float32, decoder=True)

        def decoded(latents: torch.Tensor) -> bytes | None:
            frames = decode_clip(vae, latents)
            if frames is None:
                return None
            with tempfile.TemporaryDirectory() as folder:
                file = Path(folder, "clip.mp4")
                write_mp4(file, list(frames), self.order.trainer.samples.fps)
                return file.read_bytes()

        return decoded

    def write_copy(self, network: Denoiser, folder: Path) -> None:
        """Write each network's LoRA, in the names of diffusers, musubi-tuner and ComfyUI."""
        with atomic.replacing_folder(folder) as new:
            for transformer, high_noise in _networks(network):
                write_lora(transformer, new, high_noise=high_noise)

    def read_copy(self, network: Denoiser, folder: Path) -> None:
        """Read each network's LoRA."""
        for transformer, high_noise in _networks(network):
            read_lora(transformer, folder, high_noise=high_noise)


def _networks(network: Denoiser) -> list[tuple[Transformer, bool]]:
    """Return the networks that are trained, and whether each is the one for high noise."""
    both = ((network.low, False), (network.high, True))
    return [(transformer, high) for transformer, high in both if transformer is not None]


def _check(transformer: Transformer, channels: int, text_width: int, path: str) -> None:
    """Refuse a network whose inputs are not what the caches hold."""
    config = transformer.config
    for name, takes, holds in (
        ("latents", config.out_channels, channels),
        ("embeddings", config.text_dim, text_width),
    ):
        if takes != holds:
            sides = "channels" if name == "latents" else "values a token"
            raise ModelError(
                f"the network takes {name} of {takes} {sides}, but the caches' have {holds}",
                where=path,
                hint="`dit`, `vae` and `text` of the model must come from the same base model",
            )
