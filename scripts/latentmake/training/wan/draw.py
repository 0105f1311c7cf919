"""Clips of Wan's networks with and without their LoRAs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from latentmake.caches.encoders.device import compute_dtype, within_memory
from latentmake.caches.encoders.wan import WanVae, load_wan_vae
from latentmake.files.video import write_mp4
from latentmake.progress import say
from latentmake.training.loop.caches import WAN, Batch, read_text
from latentmake.training.loop.clips import GenerationOrder
from latentmake.training.loop.draw import Done, Painter, Size3
from latentmake.training.loop.order import Prompt
from latentmake.training.wan.recipe import (
    CLIP,
    FIRST_FRAME,
    Denoiser,
    load_transformer,
    read_lora,
)
from latentmake.training.wan.sampling import (
    Condition,
    condition_of,
    frames_of,
    noise_of,
    sample_latents,
)


class WanPainter(Painter):
    """Draws clips by Wan's networks, decodes and writes them."""

    def __init__(self, order: GenerationOrder) -> None:
        super().__init__(order)
        self._network: Any = None
        self._negative: torch.Tensor | None = None
        self._condition: Condition | None = None
        self._vae: WanVae | None = None

    def load(self, adapter: bool) -> None:
        """Load the networks, and their LoRAs if any clip needs them."""
        order, dtype = self.order, compute_dtype(self.device, "bfloat16", lambda line: None)
        self._condition = condition_of(order, self.device)
        model, networks, files = order.model, list[Any](), iter(order.adapters)
        for path in (model.dit, model.dit_high_noise):
            network = None if path is None else load_transformer(path, dtype=dtype)
            if network is not None and adapter:
                read_lora(network, Path(next(files)), order.strength)
            networks.append(network)
        if model.version.boundary is not None and None in networks:
            say(
                f"{order.run}: the model names one of Wan 2.2's two networks, which draws all steps"
            )
        low, high_noise = networks
        boundary = order.settings.timestep_boundary or 0.0
        network = Denoiser(low, high_noise, boundary).eval().requires_grad_(False)
        self.use(network, dtype)

    def adapt(self, used: bool) -> None:
        """Draw with the LoRAs from now on, or without them."""
        for each, _ in self._network.networks():
            if getattr(each, "peft_config", None):
                (each.enable_adapters if used else each.disable_adapters)()

    def use(self, network: Denoiser, dtype: torch.dtype) -> None:
        """Compute with this network, whose inputs have a dtype.

        The network is on the device from its first use until a clip is decoded.
        """
        self._network, self._dtype = network, dtype
        if self.order.negative is not None:
            self._negative = read_text(self.order.negative, WAN)["text"]
        network.lend(self.device)

    def latents(
        self, prompt: Prompt, seed: int, size: Size3, batch: Batch | None, done: Done
    ) -> torch.Tensor | None:
        """Draw the latents of a clip; see `sample_latents`."""
        condition = self._condition
        if batch is not None and FIRST_FRAME in batch.more:
            seen = batch.more.get(CLIP)
            condition = Condition(batch.more[FIRST_FRAME][0], None if seen is None else seen[0])
        return within_memory(
            sample_latents,
            self._network,
            read_text(prompt.text, WAN)["text"],
            self._negative,
            noise_of(seed, *size),
            self.order.settings,
            device=self.device,
            dtype=self._dtype,
            condition=condition,
            done=done,
        )

    def pixels(self, path: Path, latents: torch.Tensor) -> NDArray[np.uint8] | None:
        """Write a clip as MP4; return its frames, [F, H, W, 3]."""
        if self._network is not None:
            self._network.withdraw()
        model = self.order.model
        if self._vae is None:
            self._vae = load_wan_vae(model.vae, self.device, torch.float32, decoder=True)
            if model.vae_cache_cpu:
                self._vae.tile()
        frames = frames_of(self._vae, latents)
        if frames is not None:
            write_mp4(path, frames, self.order.settings.fps or 1)
        return frames
