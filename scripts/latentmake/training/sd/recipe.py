"""Recipe of the trainer `sd`: a UNet, its noise schedule, its loss, and pictures as latents.

Diffusion is that of diffusers' DDPMScheduler: noisy = sqrt(a) x + sqrt(1 - a) noise (Ho et al.
2020, https://arxiv.org/abs/2006.11239); the target is the noise, or v = sqrt(a) noise - sqrt(1 - a)
x (Salimans and Ho 2022, https://arxiv.org/abs/2202.00512). Flow matching is that of diffusers'
FlowMatchEulerDiscreteScheduler.

DDIM: Song et al. 2021, https://arxiv.org/abs/2010.02502; Euler steps for a network that has learnt
flow matching; guidance: Ho and Salimans 2022, https://arxiv.org/abs/2207.12598. A prompt's noise
follows from the samples' seed and the prompt alone: it is the same at every step of the training,
so that the rows of the grid differ by the training alone, and other prompts may come and go.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias, cast

import numpy as np
import torch
from diffusers import DDIMScheduler, DDPMScheduler, FlowMatchEulerDiscreteScheduler
from diffusers.training_utils import compute_snr
from numpy.typing import NDArray

from latentmake.caches.encoders.device import pixel_bytes
from latentmake.caches.encoders.vae import load_vae, tile
from latentmake.config.architectures import GENERIC, Architecture
from latentmake.config.weights import NO_WEIGHTS, Weights
from latentmake.errors import ModelError
from latentmake.models import files
from latentmake.models.parameterization import (
    FLOW,
    Given,
    flows,
    missing_schedule,
    parameterization,
)
from latentmake.training.loop.caches import PLAIN, SDXL, Batch, Stored, copied, pad, read_text
from latentmake.training.loop.order import ClipSettings
from latentmake.training.loop.recipe import Network, Painter, Recipe, set_up
from latentmake.training.loop.recipe import Objective as LoopObjective
from latentmake.training.sd import network
from latentmake.training.sd.unet import (
    KOHYA_WEIGHTS,
    LORA_WEIGHTS,
    PROJECTION_FOLDER,
    UNET_FOLDER,
    XL,
    SdOrder,
    describe,
)

NoiseSchedule: TypeAlias = Any  # one of diffusers' schedulers, which have no types
_Diffusion: NoiseSchedule = DDPMScheduler
_Ddim: NoiseSchedule = DDIMScheduler
_Flow: NoiseSchedule = FlowMatchEulerDiscreteScheduler
_snr: Callable[[NoiseSchedule, torch.Tensor], torch.Tensor] = compute_snr
Prediction = Literal["epsilon", "v_prediction", "flow_matching"]


def load_noise_schedule(
    scheduler: Path | str,
    prediction: Prediction | None,
    unet: Weights = NO_WEIGHTS,
    *,
    zero_terminal_snr: bool | None = None,
    architecture: Architecture = GENERIC,
) -> NoiseSchedule:
    """Return a FlowMatchEulerDiscreteScheduler for flow matching, else a DDPMScheduler.

    Args:
        scheduler: folder of scheduler_config.json, of any of diffusers' schedulers; "" for that of
            the UNet's repository on the hub, which is fetched where it is not there yet.
        prediction: of the network; None for that of its files.
        unet: the network.
        zero_terminal_snr: whether the last timestep is noise only; None for what the files say.
        architecture: of the network.

    Raises:
        ModelError: see `parameterization`.
    """
    config = None
    if not scheduler:
        try:
            folder = {"subfolder": "scheduler", "revision": unet.revision}
            config = dict(_Diffusion.load_config(unet.hub, **folder))
        except (OSError, ValueError, TypeError):
            raise missing_schedule(f"{unet.hub}@{unet.revision}/scheduler") from None
    given = Given(prediction, zero_terminal_snr)
    found = parameterization(unet, str(scheduler), architecture, given, config)
    assert found is not None
    config = found.schedule
    if found.prediction == FLOW:
        known = {"num_train_timesteps": config.get("num_train_timesteps", 1000)}
        if config.get("use_flow_sigmas"):  # of a solver such as UniPCMultistepScheduler
            known["shift"] = config.get("flow_shift", 1.0)
        return _Flow.from_config(config if flows(config) else known)
    changes = {"clip_sample": False, "thresholding": False}  # latents have no bounds
    return _Diffusion.from_config(config, **changes)


def predict(
    network: Any, batch: Batch, noisy: torch.Tensor, timesteps: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Return the UNet's prediction; see the loop's `Objective`.

    SDXL's further conditions are those of `more`, under diffusers' names.
    """
    device = noisy.device
    predicted: torch.Tensor = network(
        noisy.to(dtype),
        copied(timesteps, device),
        copied(batch.text, device, dtype),
        encoder_attention_mask=None if batch.mask is None else copied(batch.mask, device),
        added_cond_kwargs={name: copied(each, device) for name, each in batch.more.items()},
        return_dict=False,
    )[0]
    return predicted


class Objective(LoopObjective):
    """Noise, timesteps and losses of a training.

    Args:
        schedule: of `load_noise_schedule`.
        snr_gamma: Min-SNR weighting (Hang et al. 2023, https://arxiv.org/abs/2303.09556): a
            timestep counts min(snr, gamma) / snr, and for v min(snr, gamma) / (snr + 1); None
            weighs all alike.
        noise_offset: share of noise that is constant over a channel
            (https://www.crosslabs.org/blog/diffusion-with-offset-noise).
    """

    predict = staticmethod(predict)

    def __init__(
        self, schedule: NoiseSchedule, *, snr_gamma: float | None = None, noise_offset: float = 0.0
    ) -> None:
        self.schedule = schedule
        self.flow = isinstance(schedule, FlowMatchEulerDiscreteScheduler)
        self.timesteps = int(schedule.config.num_train_timesteps)
        self._gamma = snr_gamma
        self._offset = noise_offset
        if self.flow and snr_gamma is not None:
            what = "the model's noise schedule is one of flow matching, which has no `snr_gamma`"
            raise ModelError(what, where="trainer.snr_gamma", hint="leave it out")

    def draw(self, shape: torch.Size, random: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        """Return noise of a batch's shape and a timestep for each of its examples, on the CPU.

        Timesteps are whole numbers from 0 for diffusion, and for flow matching float32 in
        (0, timesteps), spread evenly before the schedule's shift.
        """
        noise = torch.randn(shape, generator=random)
        if self._offset:
            noise += self._offset * torch.randn((*shape[:2], 1, 1), generator=random)
        if self.flow:
            return noise, self.at(torch.rand(shape[:1], generator=random))
        return noise, torch.randint(0, self.timesteps, shape[:1], generator=random)

    def at(self, shares: torch.Tensor) -> torch.Tensor:
        """Return the timesteps at some shares, in [0, 1), of the way into the noise."""
        if not self.flow:
            return (shares * self.timesteps).long()
        shift = float(self.schedule.config.shift)
        sigmas = shares.clamp(1e-5, 1 - 1e-5)
        return self.timesteps * shift * sigmas / (1 + (shift - 1) * sigmas)

    def noisy(
        self, latents: torch.Tensor, noise: torch.Tensor, timesteps: torch.Tensor
    ) -> torch.Tensor:
        """Return latents with the noise of their timesteps."""
        if self.flow:
            return super().noisy(latents, noise, timesteps)
        mixed: torch.Tensor = self.schedule.add_noise(latents, noise, timesteps)
        return mixed

    def target(
        self, latents: torch.Tensor, noise: torch.Tensor, timesteps: torch.Tensor
    ) -> torch.Tensor:
        """Return the network's target, of the latents' shape."""
        if self.flow:
            return super().target(latents, noise, timesteps)
        if self.schedule.config.prediction_type == "epsilon":
            return noise
        velocity: torch.Tensor = self.schedule.get_velocity(latents, noise, timesteps)
        return velocity

    def weights(self, timesteps: torch.Tensor) -> torch.Tensor | None:
        """Return the weight of each timestep, [batch]; None where all have the same."""
        if self._gamma is None:
            return None
        snr = _snr(self.schedule, timesteps)
        least = snr.clamp(max=self._gamma)
        if self.schedule.config.prediction_type == "v_prediction":
            return least / (snr + 1)
        return torch.where(snr > 0, least / snr, 1.0)  # its limit where all is noise


_PIXELS = 8.0  # a latent's width in pixels, where nothing says; that of all Stable Diffusions


@torch.no_grad()
def sample_latents(
    network: Network,
    schedule: NoiseSchedule,
    texts: Sequence[Mapping[str, torch.Tensor]],
    noise: torch.Tensor,
    settings: ClipSettings,
    *,
    dtype: torch.dtype,
    done: Callable[[], object] = lambda: None,
) -> torch.Tensor:
    """Draw the latents of a picture as the network sees them, [channels, height, width].

    `texts` have `text` [tokens, width] of the prompt with SDXL's further conditions, and of that
    which guidance leads away from, if there is guidance. The noise has a standard deviation of 1
    for all schedules. `done` is called after each step.
    """
    config, device = schedule.config, noise.device
    flow = isinstance(schedule, FlowMatchEulerDiscreteScheduler)
    schedule = (_Flow if flow else _Ddim).from_config(config)
    schedule.set_timesteps(min(settings.num_inference_steps, int(config.num_train_timesteps)))
    more = {
        name: torch.stack([each[name] for each in texts]).to(device)
        for name in texts[0]
        if name != "text"
    }
    embeddings, mask = pad([each["text"] for each in texts])
    mask = None if mask is None else mask.to(device)
    latents = noise[None]
    batch = Batch(latents, embeddings.to(device, dtype), mask, more=more)
    for timestep in schedule.timesteps:
        inputs = latents.expand(len(texts), *noise.shape)
        timesteps = timestep.to(device).expand(len(inputs))
        predicted = predict(network, batch, inputs, timesteps, dtype).float()
        if len(texts) > 1:
            with_text, without = predicted.chunk(2)
            predicted = without + settings.guidance_scale * (with_text - without)
        latents = schedule.step(predicted, timestep, latents, return_dict=False)[0]
        done()
    return latents[0].float()


class Decoder:
    """A VAE that decodes."""

    def __init__(self, vae: Any) -> None:
        self._vae = vae

    @torch.no_grad()
    def decode(self, latents: torch.Tensor) -> NDArray[np.uint8]:
        """Decode the unscaled latents [channels, height, width] of a picture to [1, H, W, 3]."""
        first = next(self._vae.parameters())
        (pixels,) = self._vae.decode(latents[None].to(first.device, first.dtype), return_dict=False)
        found: NDArray[np.uint8] = pixel_bytes(pixels).permute(0, 2, 3, 1).numpy()
        return found

    def tile(self) -> None:
        """Decode in tiles from now on."""
        tile(self._vae)


class SdPainter(Painter):
    """Draws pictures by a UNet."""

    def latents(
        self, text: str, seed: int, size: Sequence[int], done: Callable[[], object], _: object
    ) -> torch.Tensor:
        """Draw the latents of a picture."""
        (_, height, width), tensors, stored = size, self.recipe.tensors, self.stored
        order = self.recipe.order
        sizes = {"time_ids": torch.tensor([height, width, 0.0, 0.0, height, width])}  # not cut
        texts = [
            read_text(path, tensors) | (sizes if len(tensors.text) > 1 else {})
            for path in (text, self.negative)
            if path is not None
        ]
        pixels = pixels_of(stored, order.model.vae)
        shape = stored.shape[0], *(max(1, round(side / pixels)) for side in (height, width))
        noise = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(self.device)
        schedule = cast(Objective, self.objective).schedule
        drawn = sample_latents(
            self.network, schedule, texts, noise, self.settings, dtype=self.dtype, done=done
        )
        return drawn.cpu() / stored.scaling + stored.shift

    def load_vae(self) -> Decoder:
        """Load the VAE."""
        return Decoder(load_vae(self.recipe.order.model.vae, self.device, torch.float32))


def pixels_of(latents: Stored, vae: Weights) -> float:
    """Return a latent's width in pixels."""
    return latents.pixels or files.vae_factor(vae) or _PIXELS


class SdRecipe(Recipe):
    """Recipe of the trainer `sd`."""

    results = (LORA_WEIGHTS, KOHYA_WEIGHTS, UNET_FOLDER, PROJECTION_FOLDER)
    painter = SdPainter
    order: SdOrder

    def __init__(self, order: SdOrder) -> None:
        super().__init__(order)
        self.tensors = SDXL if order.model.architecture == XL else PLAIN

    def make_objective(self) -> Objective:
        """Return noise and loss of the noise schedule."""
        order, settings = self.order, self.order.trainer
        schedule = load_noise_schedule(
            order.scheduler,
            settings.prediction_type,
            order.unet,
            zero_terminal_snr=settings.zero_terminal_snr,
            architecture=order.model.spec,
        )
        return Objective(schedule, snr_gamma=settings.snr_gamma, noise_offset=settings.noise_offset)

    def make_network(
        self, *, channels: int, text_width: int, dtype: torch.dtype, plain: bool = False
    ) -> network.Denoiser:
        """Return the UNet with what is trained of it."""
        order, settings = self.order, self.order.trainer
        denoiser = network.load_denoiser(order, channels, text_width)
        if plain and order.trains_lora:
            denoiser.unet.to(dtype)
        else:
            network.adapt(denoiser, settings, dtype, order.init_files)
        set_up(settings)
        return denoiser

    def clip_size(self, latents: Stored) -> tuple[int, int, int]:
        """Return frames, height and width of a picture, from its latents."""
        _, height, width = latents.shape
        pixels = pixels_of(latents, self.order.model.vae)
        return 1, round(height * pixels), round(width * pixels)

    def write_copy(self, denoiser: network.Denoiser, folder: Path) -> None:
        """Write a LoRA or a UNet, and a projection."""
        described = None
        if self.order.trains_lora:
            schedule = self.make_objective().schedule.config
            prediction = schedule.get("prediction_type")
            described = describe(self.order, denoiser.unet.config, prediction)
        network.write_denoiser(denoiser, folder, described)

    def read_copy(
        self, denoiser: network.Denoiser, files: Sequence[Path], strength: float = 1.0
    ) -> None:
        """Read a LoRA or a UNet, and a projection."""
        network.read_denoiser(denoiser, files[0], strength, lora=self.order.trains_lora)
