"""Recipe of the trainer `sd`: a UNet, its noise schedule, pictures."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from latentmake.caches.encoders.device import within_memory
from latentmake.caches.encoders.projection import load_projection, write_projection
from latentmake.caches.encoders.vae import load_vae, tile
from latentmake.files import atomic
from latentmake.training.loop.accelerator import set_up
from latentmake.training.loop.batch_order import seed_of
from latentmake.training.loop.caches import PLAIN, SDXL, Stored
from latentmake.training.loop.grid import png_of
from latentmake.training.loop.recipe import Recipe
from latentmake.training.lora import begin_lora, load_lora, unreadable
from latentmake.training.sd import network
from latentmake.training.sd.lora_files import describe, places_of, write_lora
from latentmake.training.sd.objective import Objective, load_noise_schedule
from latentmake.training.sd.order import (
    KOHYA_WEIGHTS,
    LORA_WEIGHTS,
    PROJECTION_FOLDER,
    UNET_FOLDER,
    SdOrder,
)
from latentmake.training.sd.sampling import Sampler, decode, make_sampler
from latentmake.training.sd.unet import PREFIX, XL


class SdRecipe(Recipe):
    """Recipe of the trainer `sd`."""

    results = (LORA_WEIGHTS, KOHYA_WEIGHTS, UNET_FOLDER, PROJECTION_FOLDER)
    order: SdOrder

    def __init__(self, order: SdOrder) -> None:
        super().__init__(order)
        settings = order.trainer
        lora = settings.adapter == "lora"
        self.alpha = float(settings.alpha or settings.rank) if lora else None
        self.tensors = SDXL if order.architecture == XL else PLAIN
        self.described = cache(lambda: describe(order))

    def make_objective(self) -> Objective:
        """Return noise and loss of the noise schedule."""
        order, settings = self.order, self.order.trainer
        schedule = load_noise_schedule(order.scheduler, settings.prediction_type, order.unet)
        return Objective(schedule, snr_gamma=settings.snr_gamma, noise_offset=settings.noise_offset)

    def make_network(
        self, *, channels: int, text_width: int, dtype: torch.dtype
    ) -> network.Denoiser:
        """Return the UNet with what is trained of it."""
        order, settings = self.order, self.order.trainer
        where = order.unet.path or order.unet.hub or ""
        unet = network.load_unet(order.unet, order.architecture)
        network.check_latents(unet, channels, where)
        torch.manual_seed(seed_of(settings.seed, "network"))
        projection = network.make_projection(unet, order.text_projection, text_width, where)
        denoiser = network.Denoiser(unet, projection)
        network.adapt(denoiser, settings, dtype)
        for file in order.init_files:
            begin_lora(unet, file, places_of(unet))
        set_up(settings)
        return denoiser

    def make_sampler(self, objective: Objective, latents: Stored) -> Sampler:
        """Return the sampler of pictures."""
        return make_sampler(self.order, objective.schedule, latents, self.tensors)

    def make_decoder(self, device: torch.device) -> Callable[[torch.Tensor], bytes | None]:
        """Load the VAE; return what makes a PNG of a picture's latents."""
        vae = load_vae(self.order.vae, device, torch.float32)

        def decoded(latents: torch.Tensor) -> bytes | None:
            picture = within_memory(decode, vae, latents)
            if picture is None:
                tile(vae)
                picture = within_memory(decode, vae, latents)
            return None if picture is None else png_of(picture)

        return decoded

    def write_copy(self, denoiser: network.Denoiser, folder: Path) -> None:
        """Write a LoRA or a UNet, and a projection."""
        with atomic.replacing_folder(folder) as new:
            if self.alpha is not None:
                write_lora(denoiser.unet, new, self.described())
            else:
                unet = new / UNET_FOLDER
                denoiser.unet.save_pretrained(unet, safe_serialization=True, max_shard_size="1TB")
            if denoiser.text_projection is not None:
                write_projection(denoiser.text_projection, new / PROJECTION_FOLDER)

    def read_copy(self, denoiser: network.Denoiser, folder: Path) -> None:
        """Read a LoRA or a UNet, and a projection."""
        file = folder / self.order.results[0]
        try:
            if self.alpha is not None:
                load_lora(denoiser.unet, file, PREFIX)
            else:
                denoiser.unet.load_state_dict(load_file(file))
            if denoiser.text_projection is not None:
                file = folder / PROJECTION_FOLDER
                denoiser.text_projection.load_state_dict(load_projection(str(file)).state_dict())
        except (OSError, SafetensorError, RuntimeError) as error:
            raise unreadable(error, file) from None
