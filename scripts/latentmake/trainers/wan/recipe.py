"""Recipe of the trainer `wan`: LoRAs of Wan's networks, flow matching, sampling of clips.

A share s of noise is drawn from a uniform distribution, or as the sigmoid of a normal number (Esser
et al. 2024, section 3.1, https://arxiv.org/abs/2403.03206). It is shifted to shift s / (1 + (shift
- 1) s), as in diffusers' FlowMatchEulerDiscreteScheduler and musubi-tuner's `--timestep_sampling
shift`. The timestep of the network is 1000 s.

All files of a LoRA contain the same float32 numbers. The LoRA adds alpha / rank * up @ down to the
weight of a layer.

| file | key of a layer's down matrix | alpha | source |
|---|---|---|---|
| diffusers | `transformer.blocks.0.attn1.to_q.lora_A.weight` | metadata | `WanLoraLoaderMixin` |
| musubi | `lora_unet_blocks_0_self_attn_q.lora_down.weight` | `.alpha` | `networks/lora_wan.py` |
| comfyui | `diffusion_model.blocks.0.self_attn.q.lora_down.weight` | `.alpha` | `comfy/lora.py` |

ComfyUI's `model_lora_keys_unet` accepts the model's own layer names ("generic lora format"), and
its `LoRAAdapter.load` reads `lora_up`, `lora_down` and a scalar `alpha`. musubi-tuner's
`convert_lora.py` reads this file, too. So does diffusers, which multiplies alpha into the matrices.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
from diffusers import WanTransformer3DModel

from latentmake.base import atomic
from latentmake.base.errors import ModelError
from latentmake.base.progress import say
from latentmake.config.weights import Weights
from latentmake.encode.encoders.local_state import fill, local_state, refusing, without_weights
from latentmake.runs.order import Record
from latentmake.trainers.loop import recipe as loop
from latentmake.trainers.loop.caches import WAN, Batch, CacheFile, copied
from latentmake.trainers.loop.recipe import Part, Recipe, seed_of, set_up
from latentmake.trainers.lora import begin_lora, kohya_bytes, load_lora, lora_bytes, new_adapter
from latentmake.trainers.wan.dit import (
    HINT,
    IGNORED,
    LAST,
    PLACES,
    PREFIX,
    WanOrder,
    lora_names,
    read_dit,
    to_diffusers,
)
from latentmake.trainers.wan.sampling import CLIP, FIRST_FRAME, WanPainter, padded
from latentmake.trainers.weights_metadata import base_of, metadata_of, of_architecture

Transformer: TypeAlias = Any  # a WanTransformer3DModel: diffusers and peft have no types
_Transformer: Transformer = WanTransformer3DModel
_not_compiled: Any = torch.compiler.disable  # torch has no types for it


def load_transformer(path: str, *, dtype: torch.dtype = torch.bfloat16) -> Transformer:
    """Load Wan's network, frozen, on the CPU; raises ModelError.

    Weights that are stored in the right dtype are mapped from the file; other weights take memory
    once. Layers in diffusers' `_keep_in_fp32_modules` stay float32 for every dtype. See `read_dit`
    for the path.
    """
    (_, config), weights = read_dit(path), Weights(path=path)
    with refusing(weights, "Wan's DiT", HINT):
        state = {
            to_diffusers(name): value
            for name, value in local_state(weights).items()
            if IGNORED not in name
        }
        transformer = without_weights(_Transformer, config)
        fill(transformer, state)
        del state  # each tensor can now be freed after its conversion
        kept = set(_Transformer._keep_in_fp32_modules)
        for name, parameter in transformer.named_parameters():
            exact = kept.intersection(name.split("."))
            parameter.data = parameter.data.to(torch.float32 if exact else dtype)
        # The tables of `rope` are no weights: `fill` left them on the meta device.
        rope = transformer.rope
        transformer.rope = type(rope)(rope.attention_head_dim, rope.patch_size, rope.max_seq_len)
    return transformer.train()


class Denoiser(torch.nn.Module):
    """One network for all timesteps, or two networks with a boundary between them.

    Attributes:
        low: network for low noise, or the only network; None if it is not trained.
        high: network for high noise; None if it is not trained.
        boundary: fraction of the timesteps from which `high` is used.
    """

    def __init__(
        self, low: Transformer | None, high: Transformer | None = None, boundary: float = 1.0
    ) -> None:
        super().__init__()
        self.low, self.high, self.boundary = low, high, boundary
        # Network -> frozen parameters, with their tensors in CPU memory.
        self._frozen: dict[Transformer, list[tuple[torch.nn.Parameter, torch.Tensor]]] = {}
        self._on_device: set[Transformer] = set()
        self._device, self._takes_turns = torch.device("cpu"), False

    def fits(self, device: torch.device) -> bool:
        """Whether a device has room for all weights, and for as much again as a training needs."""
        if device.type != "cuda":
            return True
        size = sum(weights.numel() * weights.element_size() for weights in self.parameters())
        torch.cuda.empty_cache()
        return 2 * size <= torch.cuda.mem_get_info(device)[0]

    def lend(self, device: torch.device) -> None:
        """Move the frozen weights of a network to a device when the network is called.

        If two networks do not both fit, the one in use replaces the other. The frozen weights also
        stay in CPU memory. LoRAs stay on the device all the time, like the state of the optimizer.
        Call this method again after adding a LoRA.
        """
        self.withdraw()
        self._device, self._takes_turns = device, not self.fits(device)
        for network, _ in self.networks():
            network.rope.to(device)
            if network not in self._frozen:
                network.register_forward_pre_hook(
                    _not_compiled(lambda module, _: self.bring(module))
                )
            self._frozen[network] = []
            for name, parameter in network.named_parameters():
                if "lora_" in name:
                    parameter.data = parameter.data.to(device)
                else:
                    self._frozen[network].append((parameter, parameter.data))
        # DDP must not send frozen weights to other processes: these read the same file, and not all
        # weights are on the device.
        ignored = [name for name, _ in self.named_parameters() if "lora_" not in name]
        self._ddp_params_and_buffers_to_ignore = ignored

    def bring(self, network: Transformer) -> None:
        """Move the frozen weights of a lent network to the device, unless they are there."""
        if network in self._on_device or network not in self._frozen:
            return
        if self._takes_turns:
            self.withdraw()
        for parameter, value in self._frozen[network]:
            parameter.data = value.to(self._device)
        self._on_device.add(network)

    def withdraw(self) -> None:
        """Remove frozen weights from the device; the networks use their CPU memory again."""
        for network in self._on_device:
            for parameter, value in self._frozen[network]:
                parameter.data = value
        self._on_device.clear()

    def networks(self) -> list[tuple[Transformer, bool]]:
        """Return each network, and whether it is the network for high noise."""
        both = ((self.low, False), (self.high, True))
        return [(network, high) for network, high in both if network is not None]

    def forward(
        self,
        hidden_states: torch.Tensor,
        timestep: torch.Tensor,
        *,
        high: bool = False,
        **named: Any,
    ) -> Any:
        """Call the network for the timesteps [batch]; return (velocity,).

        With two networks, `high` selects the one for high noise: all timesteps of a batch are on
        the same side of the boundary.
        """
        network = self.high if self.low is None or (high and self.high is not None) else self.low
        assert network is not None
        return network(hidden_states=hidden_states, timestep=timestep, **named)


def write_lora(
    transformer: Transformer,
    folder: Path,
    *,
    high_noise: bool = False,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write the LoRA of a network into a folder, as the files of `lora_names`.

    The same LoRA with the same further `metadata` gives the same bytes.
    """
    diffusers, musubi, comfyui = (folder / name for name in lora_names(high_noise=high_noise))
    atomic.write(diffusers, lora_bytes(transformer, PREFIX, metadata))
    named = {**metadata, "ss_network_module": "networks.lora_wan"} if metadata else None
    atomic.write(musubi, kohya_bytes(transformer, PLACES[1], named))
    # diffusers reads this file, too, and refuses an alpha for the layer LAST.
    atomic.write(comfyui, kohya_bytes(transformer, PLACES[2], metadata, scaled=LAST))


_LEAST = 1e-5  # smallest share: at 0 and 1, the normal quantile is infinite


class Objective(loop.Objective):
    """Noise, timesteps and targets of a training."""

    def __init__(self, order: WanOrder) -> None:
        self.shift, self._boundary = order.flow_shift, order.boundary
        self._normal = order.trainer.timestep_sampling == "logit_normal"
        split = 1.0 if order.boundary is None else self.quantile(order.boundary)
        # Ranges of quantiles that lead to the timesteps of a trained network, for each network.
        ranges = ((order.model.dit, (0.0, split)), (order.model.dit_high_noise, (split, 1.0)))
        self.ranges = [limits for path, limits in ranges if path is not None]

    def quantile(self, share: float) -> float:
        """Return the probability that a shifted share is below this share."""
        plain = torch.tensor(share / (self.shift - (self.shift - 1) * share), dtype=torch.float64)
        return float(torch.special.ndtr(torch.logit(plain)) if self._normal else plain)

    def shares(self, quantiles: torch.Tensor) -> torch.Tensor:
        """Return the shifted shares of noise [batch] at quantiles [batch] of the distribution."""
        plain = quantiles.double().clamp(_LEAST, 1 - _LEAST)
        if self._normal:
            plain = torch.special.ndtri(plain).sigmoid()
        return self.shift * plain / (1 + (self.shift - 1) * plain)

    def at(self, shares: torch.Tensor) -> torch.Tensor:
        """Return timesteps [batch], float32, at fractions in [0, 1) of the trained ranges."""
        (start, _), (_, stop) = self.ranges[0], self.ranges[-1]  # two ranges are neighbours
        return self._timesteps(start + (stop - start) * shares.double())

    def _timesteps(self, quantiles: torch.Tensor) -> torch.Tensor:
        return (self.shares(quantiles) * self.timesteps).float()

    def high(self, timesteps: torch.Tensor) -> bool:
        """Whether the timesteps [batch] of a micro-batch belong to the network for high noise.

        Pass timesteps on the CPU: reading them from a GPU would make the CPU wait for it.
        """
        start = math.inf if self._boundary is None else self._boundary * self.timesteps
        return bool((timesteps >= start).any())

    def in_turns(self, parts: Iterable[Part], step: int) -> Iterable[Part]:
        """Group the micro-batches of a step by network, so that networks are swapped at most once.

        The order for one network does not change, and so the sum of its gradients stays the same.
        """
        if len(self.ranges) < 2:
            return parts
        # Alternate the order: a step begins with the network that is on the device already.
        return sorted(parts, key=lambda part: self.high(part[2]), reverse=step % 2 == 0)

    def draw(self, shape: torch.Size, random: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw noise of this shape, and timesteps [batch] of one network, for a micro-batch.

        With two networks, the probability of a network is that of its range of timesteps.
        """
        noise = torch.randn(shape, generator=random)
        start, stop = self.ranges[0]
        two = len(self.ranges) > 1  # the first of two ranges begins at 0
        if two and float(torch.rand((), generator=random, dtype=torch.float64)) >= stop:
            start, stop = self.ranges[1]
        drawn = torch.rand(shape[:1], generator=random, dtype=torch.float64)
        return noise, self._timesteps(start + (stop - start) * drawn)

    def predict(
        self, network: Any, batch: Batch, noisy: torch.Tensor, timesteps: torch.Tensor
    ) -> torch.Tensor:
        """Return the velocity that the network predicts; see the loop's `Objective`.

        As in diffusers' pipelines of Wan, the text is padded with zeros, without a mask. For
        image-to-video, the channels of the first frame follow those of the noisy latents [batch,
        channels, frames, height, width].
        """
        device, dtype, seen = noisy.device, noisy.dtype, batch.more.get(CLIP)
        if FIRST_FRAME in batch.more:
            noisy = torch.cat([noisy, copied(batch.more[FIRST_FRAME], device, dtype)], dim=1)
        predicted: torch.Tensor = network(
            hidden_states=noisy,
            timestep=copied(timesteps, device),
            encoder_hidden_states=padded(copied(batch.text, device, dtype)),
            encoder_hidden_states_image=None if seen is None else copied(seen, device, dtype),
            return_dict=False,
            high=self.high(timesteps),
        )[0]
        return predicted


class WanRecipe(Recipe):
    """Recipe of the trainer `wan`."""

    results = (*lora_names(), *lora_names(high_noise=True))
    probes = 16  # few, since one may take seconds
    rate = "items_per_second"
    objective = Objective
    painter = WanPainter
    order: WanOrder

    def __init__(self, order: WanOrder) -> None:
        super().__init__(order)
        self.several = None not in (order.model.dit, order.model.dit_high_noise)
        latents = dict(WAN.latents)
        if order.model.image_to_video:
            latents[FIRST_FRAME] = 4
        if order.model.needs_clip:
            latents[CLIP] = 2
        self.tensors = WAN._replace(latents=latents)

    def make_network(
        self, *, channels: int, text_width: int, dtype: torch.dtype, plain: bool = False
    ) -> Denoiser:
        """Return the networks, with new LoRAs unless `plain`."""
        order, settings = self.order, self.order.trainer
        torch.manual_seed(seed_of(settings.seed, "network"))
        networks: list[Transformer | None] = []
        files = iter(order.init_files)
        for path in (order.model.dit, order.model.dit_high_noise):
            transformer = None
            if path is not None:
                transformer = load_transformer(path, dtype=dtype)
                _check(transformer, channels, text_width, path)
                if not plain:
                    new_adapter(transformer, settings, dtype)
                    if (file := next(files, None)) is not None:
                        begin_lora(transformer, file, PLACES)
                    if settings.gradient_checkpointing:
                        transformer.enable_gradient_checkpointing()
            networks.append(transformer)
        set_up(settings)
        if plain and order.boundary is not None and None in networks:
            say(f"{order.run}: one of Wan 2.2's two networks is named, which draws all steps")
        low, high = networks
        return Denoiser(low, high, 1.0 if order.boundary is None else order.boundary)

    def place(self, network: Denoiser, device: torch.device, *, lend: bool = False) -> None:
        """Put the networks on a device; if they do not fit, or with `lend`, only while in use."""
        if not lend and network.fits(device):
            network.to(device)
        else:
            network.lend(device)

    def clip_size(self, latents: CacheFile) -> tuple[int, int, int]:
        """Return the frames, and the height and width in pixels, of a clip, from its latents."""
        _, frames, height, width = latents.shape
        return 4 * frames - 3, 8 * height, 8 * width

    def write_copy(self, network: Denoiser, folder: Path, record: Record, steps: int) -> None:
        """Write the LoRA of each network, in the formats of diffusers, musubi-tuner and ComfyUI."""
        model = self.order.model
        version = "wan2.1" if model.version.boundary is None else "wan2.2"
        metadata = metadata_of(self.order, record, steps)
        with atomic.replacing_folder(folder) as new:
            for transformer, high_noise in network.networks():
                place = model.dit_high_noise if high_noise else model.dit
                more = {**of_architecture(version, lora=True), **base_of(place)}
                own = {**metadata, **more} if metadata else None
                write_lora(transformer, new, high_noise=high_noise, metadata=own)

    def read_copy(self, network: Denoiser, files: Sequence[Path], strength: float = 1.0) -> None:
        """Load the LoRA of each network; add a LoRA of its sizes to a network that has none."""
        for (transformer, _), file in zip(network.networks(), files, strict=True):
            load_lora(transformer, file, PREFIX, strength)


def _check(transformer: Transformer, channels: int, text_width: int, path: str) -> None:
    """Refuse a network that does not take the latents or embeddings of the caches."""
    config = transformer.config
    for name, takes, holds in (
        ("latents", config.out_channels, channels),
        ("embeddings", config.text_dim, text_width),
    ):
        if takes != holds:
            sides = "channels" if name == "latents" else "values a token"
            what = f"the network takes {name} of {takes} {sides}, but the caches' have {holds}"
            hint = "`dit`, `vae` and `text` of the model must come from the same base model"
            raise ModelError(what, where=path, hint=hint)
