"""Recipe of the trainer `sd`: a UNet, its noise schedule, pictures.

`accelerate launch -m latentmake.training.sd.recipe ORDER` trains by it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import ClassVar

import torch

from latentmake.caches.encoders.device import within_memory
from latentmake.caches.encoders.vae import load_vae, tile
from latentmake.training.loop import objective as loop
from latentmake.training.loop.accelerator import set_up
from latentmake.training.loop.batch_order import seed_of
from latentmake.training.loop.command import carry_out
from latentmake.training.loop.data.caches import PLAIN, CacheTensors, Stored
from latentmake.training.loop.grid import png_of
from latentmake.training.loop.order import TrainingOrder
from latentmake.training.loop.recipe import Recipe
from latentmake.training.loop.result import LORA_WEIGHTS
from latentmake.training.sd import network
from latentmake.training.sd.lora_files import complete, describe
from latentmake.training.sd.objective import Objective, load_noise_schedule
from latentmake.training.sd.order import KOHYA_WEIGHTS, PROJECTION_FOLDER, UNET_FOLDER, SdOrder
from latentmake.training.sd.sampling import Sampler, decode, make_sampler


class SdRecipe(Recipe):
    """Recipe of the trainer `sd`."""

    order_type: ClassVar[type[TrainingOrder]] = SdOrder
    tensors: CacheTensors = PLAIN
    results: ClassVar[tuple[str, ...]] = (
        LORA_WEIGHTS,
        KOHYA_WEIGHTS,
        UNET_FOLDER,
        PROJECTION_FOLDER,
    )
    memory_hint: ClassVar[str] = (
        "lower `train_batch_size` (and raise `gradient_accumulation_steps`), set "
        "`gradient_checkpointing: true` or `mixed_precision: bf16`"
    )

    def __init__(self, order: SdOrder) -> None:
        self.order: SdOrder = order
        settings = order.trainer
        lora = settings.adapter == "lora"
        self.alpha = float(settings.alpha or settings.rank) if lora else None
        self._described = cache(lambda: describe(order))

    def make_objective(self) -> Objective:
        """Return noise and loss of the noise schedule."""
        settings = self.order.trainer
        schedule = load_noise_schedule(
            self.order.scheduler, settings.prediction_type, self.order.unet
        )
        return Objective(schedule, snr_gamma=settings.snr_gamma, noise_offset=settings.noise_offset)

    def make_network(
        self, *, channels: int, text_width: int, dtype: torch.dtype
    ) -> network.Denoiser:
        """Return the UNet with what is trained of it; see `Recipe.make_network`."""
        settings, where = self.order.trainer, self.order.unet.path or self.order.unet.hub or ""
        unet = network.load_unet(self.order.unet)
        network.check_latents(unet, channels, where)
        torch.manual_seed(seed_of(settings.seed, "network"))
        projection = network.make_projection(unet, self.order.text_projection, text_width, where)
        denoiser = network.Denoiser(unet, projection)
        network.adapt(denoiser, settings, dtype)
        set_up(settings)
        return denoiser

    def make_sampler(self, objective: loop.Objective, latents: Stored) -> Sampler:
        """Return the sampler of pictures."""
        assert isinstance(objective, Objective)
        return make_sampler(self.order, objective.schedule, latents)

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

    def write_copy(self, network_: network.Denoiser, folder: Path) -> None:
        """Write a LoRA or a UNet, and a projection."""
        network.write_copy(network_, folder, self._described)

    def complete(self) -> None:
        """Write the LoRA in kohya's names, and files of earlier releases in peft's."""
        complete(self.order)

    def read_copy(self, network_: network.Denoiser, folder: Path) -> None:
        """Read a LoRA or a UNet, and a projection; raises TrainingError."""
        network.read_copy(network_, folder)


def main(arguments: Sequence[str]) -> int:
    """Carry out `python -m latentmake.training.sd.recipe ORDER`; return the exit status."""
    return carry_out(arguments, SdRecipe)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
