"""Recipe of the trainer `sd`: UNet, noise schedule, loss, and sampling of pictures.

Diffusion follows diffusers' DDPMScheduler: noisy = sqrt(a) x + sqrt(1 - a) noise (Ho et al. 2020,
https://arxiv.org/abs/2006.11239). The target is the noise, or v = sqrt(a) noise - sqrt(1 - a) x
(Salimans and Ho 2022, https://arxiv.org/abs/2202.00512). Flow matching follows diffusers'
FlowMatchEulerDiscreteScheduler.

Samples use DDIM (Song et al. 2021, https://arxiv.org/abs/2010.02502), or Euler steps for flow
matching, with guidance (Ho and Salimans 2022, https://arxiv.org/abs/2207.12598). The noise of a
prompt depends only on the prompt and the samples' seed. So it is the same at every step of the
training, the rows of the grid differ only by the training, and prompts can be added or removed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias, cast

import numpy as np
import torch
from diffusers import DDIMScheduler, DDPMScheduler, FlowMatchEulerDiscreteScheduler
from diffusers.training_utils import compute_snr
from numpy.typing import NDArray

from latentmake.base.errors import ModelError
from latentmake.encode.encoders.device import pixel_bytes
from latentmake.encode.encoders.vae import load_vae, tile
from latentmake.models.parameterization import FLOW, flows, missing_schedule
from latentmake.runs.order import Record
from latentmake.trainers.loop.caches import PLAIN, SDXL, Batch, CacheFile, copied, pad, read_text
from latentmake.trainers.loop.recipe import Objective as LoopObjective
from latentmake.trainers.loop.recipe import Painter, Recipe, set_up
from latentmake.trainers.sd import network
from latentmake.trainers.sd.unet import (
    KOHYA_WEIGHTS,
    LORA_WEIGHTS,
    PROJECTION_FOLDER,
    UNET_FOLDER,
    XL,
    SdOrder,
    parameterization_of,
)
from latentmake.trainers.weights_metadata import metadata_of

NoiseSchedule: TypeAlias = Any  # one of diffusers' schedulers, which have no types
_Diffusion: NoiseSchedule = DDPMScheduler
_Ddim: NoiseSchedule = DDIMScheduler
_Flow: NoiseSchedule = FlowMatchEulerDiscreteScheduler
_snr: Callable[[NoiseSchedule, torch.Tensor], torch.Tensor] = compute_snr


def load_noise_schedule(order: SdOrder) -> NoiseSchedule:
    """Return a FlowMatchEulerDiscreteScheduler for flow matching, else a DDPMScheduler.

    A schedule on the hub is downloaded if necessary. Raises ModelError, see `parameterization`.
    """
    config, unet = None, order.unet
    if not order.scheduler:
        try:
            folder = {"subfolder": "scheduler", "revision": unet.revision}
            config = dict(_Diffusion.load_config(unet.hub, **folder))
        except (OSError, ValueError, TypeError):
            raise missing_schedule(f"{unet.hub}@{unet.revision}/scheduler") from None
    chosen = parameterization_of(order.model, order.trainer, config=config)
    assert chosen is not None
    config = chosen.schedule
    if chosen.prediction == FLOW:
        settings = {"num_train_timesteps": config.get("num_train_timesteps", 1000)}
        if config.get("use_flow_sigmas"):  # a solver such as UniPCMultistepScheduler
            settings["shift"] = config.get("flow_shift", 1.0)
        return _Flow.from_config(config if flows(config) else settings)
    changes = {"clip_sample": False, "thresholding": False}  # latents have no bounds
    return _Diffusion.from_config(config, **changes)


class Objective(LoopObjective):
    """Noise, timesteps and targets of a training."""

    def __init__(self, order: SdOrder) -> None:
        self._settings = order.trainer
        self.schedule = load_noise_schedule(order)
        self.flow = isinstance(self.schedule, FlowMatchEulerDiscreteScheduler)
        self.timesteps = int(self.schedule.config.num_train_timesteps)
        if self.flow and order.trainer.snr_gamma is not None:
            what = "the model's noise schedule is one of flow matching, which has no `snr_gamma`"
            raise ModelError(what, where="trainer.snr_gamma", hint="leave it out")

    def draw(self, shape: torch.Size, random: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        """Return noise of a batch's shape, and a timestep for each example, on the CPU.

        Timesteps are integers from 0 for diffusion. For flow matching, they are float32 in
        (0, timesteps); their distribution is uniform before the schedule's shift. `noise_offset`
        is the factor of additional noise that is constant over a channel
        (https://www.crosslabs.org/blog/diffusion-with-offset-noise).
        """
        noise, offset = torch.randn(shape, generator=random), self._settings.noise_offset
        if offset:
            noise += offset * torch.randn((*shape[:2], 1, 1), generator=random)
        if self.flow:
            return noise, self.at(torch.rand(shape[:1], generator=random))
        return noise, torch.randint(0, self.timesteps, shape[:1], generator=random)

    def at(self, shares: torch.Tensor) -> torch.Tensor:
        """Return the timesteps at these fractions, in [0, 1), of the way from image to noise."""
        if not self.flow:
            return (shares * self.timesteps).long()
        shift = float(self.schedule.config.shift)
        sigmas = shares.clamp(1e-5, 1 - 1e-5)
        return self.timesteps * shift * sigmas / (1 + (shift - 1) * sigmas)

    def mixed(
        self, latents: torch.Tensor, noise: torch.Tensor, timesteps: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return latents mixed with the noise of their timesteps, and the prediction's target."""
        if self.flow:
            return super().mixed(latents, noise, timesteps)
        mixed = self.schedule.add_noise(latents, noise, timesteps)
        if self.schedule.config.prediction_type == "epsilon":
            return mixed, noise
        return mixed, self.schedule.get_velocity(latents, noise, timesteps)

    def weights(self, timesteps: torch.Tensor) -> torch.Tensor | None:
        """Return the weights of the timesteps, [batch]; None if all weights are equal.

        Min-SNR weighting (Hang et al. 2023, https://arxiv.org/abs/2303.09556) is min(snr, gamma) /
        snr, or min(snr, gamma) / (snr + 1) for v.
        """
        if self._settings.snr_gamma is None:
            return None
        snr = _snr(self.schedule, timesteps)
        least = snr.clamp(max=self._settings.snr_gamma)
        if self.schedule.config.prediction_type == "v_prediction":
            return least / (snr + 1)
        return torch.where(snr > 0, least / snr, 1.0)  # 1 is the limit for pure noise

    def predict(
        self, network: Any, batch: Batch, noisy: torch.Tensor, timesteps: torch.Tensor
    ) -> torch.Tensor:
        """Return the UNet's prediction; see the loop's `Objective`.

        `batch.more` contains SDXL's further conditions, under diffusers' names.
        """
        device, dtype = noisy.device, noisy.dtype
        predicted: torch.Tensor = network(
            noisy,
            copied(timesteps, device),
            copied(batch.text, device, dtype),
            encoder_attention_mask=None if batch.mask is None else copied(batch.mask, device),
            added_cond_kwargs={name: copied(tensor, device) for name, tensor in batch.more.items()},
            return_dict=False,
        )[0]
        return predicted


class Decoder:
    """Decoder of latents: a VAE."""

    def __init__(self, vae: Any) -> None:
        self._vae = vae

    @torch.no_grad()
    def decode(self, latents: torch.Tensor) -> NDArray[np.uint8]:
        """Decode unscaled latents [channels, height, width] to a picture [1, H, W, 3]."""
        first = next(self._vae.parameters())
        (pixels,) = self._vae.decode(latents[None].to(first.device, first.dtype), return_dict=False)
        picture: NDArray[np.uint8] = pixel_bytes(pixels).permute(0, 2, 3, 1).numpy()
        return picture

    def tile(self) -> None:
        """Decode in tiles from now on."""
        tile(self._vae)


class SdPainter(Painter):
    """Samples pictures with a UNet."""

    def latents(
        self, text: str, seed: int, size: Sequence[int], done: Callable[[], object], _: object
    ) -> torch.Tensor:
        """Sample the latents of a picture; see `Painter`."""
        (_, height, width), tensors, stored = size, self.recipe.tensors, self.stored
        sizes = {"time_ids": torch.tensor([height, width, 0.0, 0.0, height, width])}  # not cropped
        texts = [
            read_text(path, tensors) | (sizes if len(tensors.text) > 1 else {})
            for path in (text, self.negative)
            if path is not None
        ]
        sides = (max(1, round(side / stored.pixels)) for side in (height, width))
        shape = stored.shape[0], *sides
        noise = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(self.device)
        return self.sample(texts, noise, done).cpu() / stored.scaling + stored.shift

    @torch.no_grad()
    def sample(
        self,
        texts: Sequence[Mapping[str, torch.Tensor]],
        noise: torch.Tensor,
        done: Callable[[], object] = lambda: None,
    ) -> torch.Tensor:
        """Sample the latents of a picture, [channels, height, width], in the network's scale.

        Args:
            texts: embedding of the prompt, and of the negative prompt if there is guidance. Each
                contains `text` [tokens, width], and SDXL's further conditions.
            noise: noise of the latents' shape, with a standard deviation of 1 for all schedules.
            done: function that is called after each step.
        """
        objective, device = cast(Objective, self.objective), noise.device
        schedule, settings = objective.schedule, self.settings
        config = schedule.config
        schedule = (_Flow if objective.flow else _Ddim).from_config(config)
        schedule.set_timesteps(min(settings.num_inference_steps, int(config.num_train_timesteps)))
        more = {
            name: torch.stack([tensors[name] for tensors in texts]).to(device)
            for name in texts[0]
            if name != "text"
        }
        embeddings, mask = pad([tensors["text"] for tensors in texts])
        mask = None if mask is None else mask.to(device)
        latents = noise[None]
        batch = Batch(latents, embeddings.to(device, self.dtype), mask, more=more)
        for timestep in schedule.timesteps:
            inputs = latents.expand(len(texts), *noise.shape).to(self.dtype)
            timesteps = timestep.to(device).expand(len(inputs))
            predicted = objective.predict(self.network, batch, inputs, timesteps).float()
            if len(texts) > 1:
                with_text, without = predicted.chunk(2)
                predicted = without + settings.guidance_scale * (with_text - without)
            latents = schedule.step(predicted, timestep, latents, return_dict=False)[0]
            done()
        return latents[0].float()

    def load_vae(self) -> Decoder:
        """Load the VAE."""
        return Decoder(load_vae(self.recipe.order.model.vae, self.device, torch.float32))


class SdRecipe(Recipe):
    """Recipe of the trainer `sd`."""

    results = (LORA_WEIGHTS, KOHYA_WEIGHTS, UNET_FOLDER, PROJECTION_FOLDER)
    objective = Objective
    painter = SdPainter
    order: SdOrder

    def __init__(self, order: SdOrder) -> None:
        super().__init__(order)
        self.tensors = SDXL if order.model.architecture == XL else PLAIN

    def make_network(
        self, *, channels: int, text_width: int, dtype: torch.dtype, plain: bool = False
    ) -> network.Denoiser:
        """Return the UNet, with its trained parameters set up."""
        order, settings = self.order, self.order.trainer
        denoiser = network.load_denoiser(order, channels, text_width)
        if plain and order.trains_lora:
            denoiser.unet.to(dtype)
        else:
            network.adapt(denoiser, settings, dtype, order.init_files)
        set_up(settings)
        return denoiser

    def clip_size(self, latents: CacheFile) -> tuple[int, int, int]:
        """Return the frames (1), height and width in pixels of a picture, from its latents."""
        _, height, width = latents.shape
        return 1, round(height * latents.pixels), round(width * latents.pixels)

    def write_copy(
        self, denoiser: network.Denoiser, folder: Path, record: Record, steps: int
    ) -> None:
        """Write the LoRA or UNet, and the projection if there is one."""
        order, metadata = self.order, metadata_of(self.order, record, steps)
        prediction = load_noise_schedule(order).config.get("prediction_type")
        network.write_copy(denoiser, folder, order, prediction, metadata)

    def read_copy(
        self, denoiser: network.Denoiser, files: Sequence[Path], strength: float = 1.0
    ) -> None:
        """Load the LoRA or UNet, and the projection if there is one."""
        network.read_copy(denoiser, files[0], strength, lora=self.order.trains_lora)
