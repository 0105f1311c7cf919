"""Recipe of the trainer `wan`: LoRAs of Wan's networks, flow matching, clips."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from latentmake.caches.encoders.wan_vae import load_wan_vae
from latentmake.errors import ModelError
from latentmake.files import atomic
from latentmake.files.mp4 import write_mp4
from latentmake.training.loop.accelerator import set_up
from latentmake.training.loop.batch_order import seed_of
from latentmake.training.loop.caches import WAN, Sought
from latentmake.training.loop.recipe import Recipe
from latentmake.training.lora import begin_lora
from latentmake.training.wan.dit import PLACES, lora_names
from latentmake.training.wan.lora_files import read_lora, write_lora
from latentmake.training.wan.network import Denoiser, Transformer, add_lora, load_transformer
from latentmake.training.wan.objective import CLIP, FIRST_FRAME, Objective
from latentmake.training.wan.order import WanOrder
from latentmake.training.wan.sampling import ClipSampler, decode_clip


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
