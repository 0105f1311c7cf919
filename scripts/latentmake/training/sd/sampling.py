"""Sample pictures as latents, by DDIM or Euler steps with classifier-free guidance.

DDIM: Song et al. 2021, https://arxiv.org/abs/2010.02502; Euler steps for a network that has learnt
flow matching; guidance: Ho and Salimans 2022, https://arxiv.org/abs/2207.12598. A prompt's noise
follows from the samples' seed and the prompt alone: it is the same at every step of the training,
so that the rows of the grid differ by the training alone, and other prompts may come and go.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from diffusers import DDIMScheduler, FlowMatchEulerDiscreteScheduler
from PIL import Image

from latentmake.models import files
from latentmake.training.loop.batch import Batch, pad
from latentmake.training.loop.batch_order import generator
from latentmake.training.loop.caches import CacheTensors, Stored, read_text
from latentmake.training.loop.recipe import Drawn, Network
from latentmake.training.loop.recipe import Sampler as LoopSampler
from latentmake.training.sd.objective import NoiseSchedule, predict
from latentmake.training.sd.order import SdOrder

_Ddim: Any = DDIMScheduler  # diffusers has no types
_Euler: Any = FlowMatchEulerDiscreteScheduler
_PIXELS = 8.0  # a latent's width in pixels, where nothing says; that of all Stable Diffusions


@dataclass(frozen=True)
class Sampler(LoopSampler):
    """Settings and embeddings of sample pictures.

    Attributes:
        schedule: the noise schedule of the training.
        negative: tensors of the caption that guidance leads away from; None for no guidance.
        shape: channels, height and width of a picture's latents.
        steps: denoising steps, at most those of the schedule.
        guidance: scale of the guidance; 1 is none.
        pictures: key -> `text` [tokens, width] of the prompt with SDXL's further conditions, and
            the seed of the noise.
        batch: most pictures drawn at once.
        scaling: the network sees (x - shift) * scaling of a picture's latents x.
        shift: see there.
    """

    schedule: NoiseSchedule
    negative: Mapping[str, torch.Tensor] | None
    shape: tuple[int, int, int]
    steps: int
    guidance: float
    pictures: Mapping[str, tuple[Mapping[str, torch.Tensor], tuple[int | str, ...]]]
    batch: int = 1
    scaling: float = 1.0
    shift: float = 0.0

    @torch.no_grad()
    def draw(
        self,
        network: Network,
        keys: Collection[str],
        *,
        device: torch.device,
        dtype: torch.dtype,
    ) -> Drawn:
        """Draw the pictures of these keys; float32, on the CPU."""
        asked = [key for key in self.pictures if key in keys]
        drawn: Drawn = {}
        for start in range(0, len(asked), self.batch):
            part = asked[start : start + self.batch]
            latents = self._latents(network, part, device, dtype) / self.scaling + self.shift
            drawn.update(zip(part, latents, strict=True))
        return drawn

    def _latents(
        self,
        network: Network,
        keys: Sequence[str],
        device: torch.device,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        flow = isinstance(self.schedule, FlowMatchEulerDiscreteScheduler)
        config = self.schedule.config
        schedule = (_Euler if flow else _Ddim).from_config(config)
        schedule.set_timesteps(min(self.steps, int(config.num_train_timesteps)))
        negative = self.negative if self.guidance > 1 else None
        negatives = [] if negative is None else [negative] * len(keys)
        texts = [*(self.pictures[key][0] for key in keys), *negatives]
        more = {
            name: torch.stack([each[name] for each in texts]).to(device)
            for name in texts[0]
            if name != "text"
        }
        text, mask = pad([each["text"] for each in texts])
        mask = None if mask is None else mask.to(device)
        seeds = [self.pictures[key][1] for key in keys]
        noise = [torch.randn(self.shape, generator=generator(*seed)) for seed in seeds]
        latents = torch.stack(noise).to(device)  # of standard deviation 1 for both schedules
        batch = Batch(latents, text.to(device, dtype), mask, more=more)
        for timestep in schedule.timesteps:
            inputs = torch.cat([latents, latents]) if negatives else latents
            timesteps = timestep.to(device).expand(len(inputs))
            predicted = predict(network, batch, inputs, timesteps, dtype).float()
            if negatives:
                with_text, without = predicted.chunk(2)
                predicted = without + self.guidance * (with_text - without)
            latents = schedule.step(predicted, timestep, latents, return_dict=False)[0]
        return latents.float().cpu()


def make_sampler(
    order: SdOrder, schedule: NoiseSchedule, latents: Stored, tensors: CacheTensors
) -> Sampler:
    """Return the sampler of a training; `latents` of a cache file have its scale and size."""
    samples = order.trainer.samples
    pixels = latents.pixels or files.vae_factor(order.vae) or _PIXELS
    width, height = order.sample_size
    sizes = {"time_ids": torch.tensor([height, width, 0.0, 0.0, height, width])}  # not cut

    def read(path: str) -> dict[str, torch.Tensor]:
        return read_text(path, tensors) | (sizes if tensors.texts else {})

    width, height = (max(1, round(side / pixels)) for side in order.sample_size)
    return Sampler(
        schedule,
        None if order.negative is None else read(order.negative),
        shape=(latents.shape[0], height, width),
        steps=samples.num_inference_steps,
        guidance=samples.guidance_scale,
        pictures={
            key: (read(prompt.text), (samples.seed, "sample", *occurrence))
            for key, prompt, occurrence in zip(
                order.picture_keys(), order.prompts, order.occurrences(), strict=True
            )
        },
        batch=order.trainer.train_batch_size,
        scaling=latents.scaling,
        shift=latents.shift,
    )


@torch.no_grad()
def decode(vae: Any, latents: torch.Tensor) -> Image.Image:
    """Decode the unscaled latents [channels, height, width] of a picture."""
    first = next(vae.parameters())
    (pixels,) = vae.decode(latents[None].to(first.device, first.dtype), return_dict=False)
    values = ((pixels[0].float() + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)
    return Image.fromarray(values.permute(1, 2, 0).cpu().numpy())
