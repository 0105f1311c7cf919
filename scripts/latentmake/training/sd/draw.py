"""Pictures of Stable Diffusion with and without its training, drawn as along the training.

A picture has the noise of the sample of its prompt and seed.
"""

from __future__ import annotations

from collections.abc import Callable
from io import BytesIO
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from latentmake.caches.encoders.device import within_memory
from latentmake.config.trainers import Samples
from latentmake.files import atomic
from latentmake.training.loop.caches import Batch, Caches, read_items
from latentmake.training.loop.clips import GenerationOrder
from latentmake.training.loop.draw import Done, Painter, Size3, autocast
from latentmake.training.loop.order import Prompt
from latentmake.training.loop.recipe import DTYPES
from latentmake.training.sd.network import Denoiser, load_denoiser, read_denoiser
from latentmake.training.sd.recipe import SdRecipe


class SdPainter(Painter):
    """Draws pictures by a UNet, decodes and writes them."""

    def __init__(self, order: GenerationOrder, recipe: SdRecipe) -> None:
        super().__init__(order)
        self._recipe, self._objective = recipe, recipe.make_objective()
        self.returns = recipe.order.trains_lora
        self._caches = Caches(read_items(Path(order.manifest))[:1], recipe.tensors)
        self._decode: Callable[[torch.Tensor], bytes | None] | None = None
        self._adapted = False

    def load(self, adapter: bool) -> None:
        """Load the UNet; what was trained is read when it is used first."""
        training, caches = self._recipe.order, self._caches
        dtype = DTYPES[training.trainer.mixed_precision]
        network = load_denoiser(training, caches.channels, caches.text_width)
        if training.trains_lora:
            network.unet.to(dtype)
            if adapter:
                self._read(network)
        self.use(network.eval().requires_grad_(False), dtype)

    def _read(self, network: Denoiser) -> None:
        file, result = Path(self.order.adapters[0]), self._recipe.order.results[0]
        folder = file.parents[result.count("/")]
        read_denoiser(network, folder, file.relative_to(folder).as_posix(), self.order.strength)
        self._adapted = True

    def adapt(self, used: bool) -> None:
        """Draw with what was trained from now on, or without its LoRA."""
        if not self.returns and used and not self._adapted:
            self._read(self._network)
        elif self.returns and self._adapted:
            unet = self._network.unet
            (unet.enable_adapters if used else unet.disable_adapters)()

    def use(self, network: Denoiser, dtype: torch.dtype) -> None:
        """Compute with this network, whose inputs have a dtype."""
        self._network, self._dtype = network.to(self.device), dtype

    def latents(
        self, prompt: Prompt, seed: int, size: Size3, batch: Batch | None, done: Done
    ) -> torch.Tensor | None:
        """Draw the latents of a picture, as a sample of the training."""
        settings, (_, height, width) = self.order.settings, size
        samples = Samples(
            num_inference_steps=settings.num_inference_steps,
            guidance_scale=settings.guidance_scale,
            seed=seed,
        )
        asked = {"prompts": [prompt], "negative": self.order.negative}
        training = self._recipe.order.with_settings(samples=samples)
        training = training.model_copy(update={**asked, "sample_size": (width, height)})
        stored = self._caches.examples[0].latents
        sampler = SdRecipe(training).make_sampler(self._objective, stored)
        with autocast(self.device, self._dtype):
            drawn = within_memory(
                sampler.draw, self._network, device=self.device, dtype=self._dtype
            )
        for _ in range(settings.num_inference_steps):
            done()
        return None if drawn is None else drawn[0]

    def pixels(self, path: Path, latents: torch.Tensor) -> NDArray[np.uint8] | None:
        """Write a picture as PNG; return its pixels as one frame, [1, H, W, 3]."""
        self._decode = self._decode or self._recipe.make_decoder(self.device)
        content = self._decode(latents)
        if content is None:
            return None
        atomic.write(path, content)
        with Image.open(BytesIO(content), formats=["PNG"]) as picture:
            return np.asarray(picture.convert("RGB"))[None]
