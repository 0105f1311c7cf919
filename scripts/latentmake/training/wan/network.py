"""Wan's networks in training, each with a LoRA, and the LoRA's files.

All files hold the same float32 numbers; the LoRA adds alpha / rank * up @ down to a layer's weight.

| file | key of a layer's down matrix | alpha | source |
|---|---|---|---|
| diffusers | `transformer.blocks.0.attn1.to_q.lora_A.weight` | metadata | `WanLoraLoaderMixin` |
| musubi | `lora_unet_blocks_0_self_attn_q.lora_down.weight` | `.alpha` | `networks/lora_wan.py` |
| comfyui | `diffusion_model.blocks.0.self_attn.q.lora_down.weight` | `.alpha` | `comfy/lora.py` |

ComfyUI's `model_lora_keys_unet` maps the name of each layer of a model itself ("generic lora
format"), and its `LoRAAdapter.load` takes `lora_up`, `lora_down` and a scalar `alpha`.
musubi-tuner's `convert_lora.py` reads that file too; so does diffusers, which multiplies alpha into
its matrices.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
from diffusers import WanTransformer3DModel

from latentmake.caches.encoders.local_state import fill, local_state, refusing, without_weights
from latentmake.config.weights import Weights
from latentmake.files import atomic
from latentmake.training.lora import add_adapter, kohya_bytes, load_lora, lora_bytes
from latentmake.training.wan.dit import (
    HINT,
    IGNORED,
    PREFIX,
    check_targets,
    comfyui_place,
    lora_names,
    musubi_place,
    read_dit,
    to_diffusers,
)

Transformer: TypeAlias = Any  # a WanTransformer3DModel: diffusers and peft have no types
_Transformer: Transformer = WanTransformer3DModel


def load_transformer(path: str, *, dtype: torch.dtype = torch.bfloat16) -> Transformer:
    """Load Wan's network on the CPU, frozen.

    Weights that have their dtype already are mapped from the files; others take memory once. What
    diffusers keeps in float32 (`_keep_in_fp32_modules`) is float32 whatever the dtype.

    Args:
        path: a diffusers folder, of the network or its pipeline; a folder of the original release;
            or a .safetensors file in diffusers' or the original names.
        dtype: of the other weights.

    Raises:
        ModelError: it is missing, damaged, incomplete, or no DiT that can be trained.
    """
    config, weights = read_dit(path).config, Weights(path=path)
    with refusing(weights, "Wan's DiT", HINT):
        state = {
            to_diffusers(name): value
            for name, value in local_state(weights).items()
            if IGNORED not in name
        }
        transformer = without_weights(_Transformer, config)
        fill(transformer, state)
        del state
        kept = set(_Transformer._keep_in_fp32_modules)
        for name, parameter in transformer.named_parameters():
            exact = kept.intersection(name.split("."))
            parameter.data = parameter.data.to(torch.float32 if exact else dtype)
        # Its tables are no weights, and still on the meta device.
        rope = transformer.rope
        transformer.rope = type(rope)(rope.attention_head_dim, rope.patch_size, rope.max_seq_len)
    return transformer.train()


def add_lora(
    transformer: Transformer,
    *,
    rank: int,
    target_modules: Sequence[str],
    alpha: float | None = None,
    autocast: bool = False,
    dropout: float = 0.0,
) -> None:
    """Freeze a network and add a float32 LoRA to it; see `add_adapter`.

    Raises:
        TrainingError: one of `target_modules` fits no layer that can have a LoRA.
    """
    shapes = {name: tuple(each.shape) for name, each in transformer.named_parameters()}
    check_targets(target_modules, shapes, "trainer.target_modules")
    add_adapter(
        transformer,
        rank=rank,
        alpha=alpha,
        target_modules=target_modules,
        autocast=autocast,
        dropout=dropout,
    )


class Denoiser(torch.nn.Module):
    """One network for all timesteps, or two with a boundary between them.

    Attributes:
        low: the network for low noise, or the only one; None where it is not trained.
        high: that for high noise, likewise.
        boundary: share of the timesteps from which on `high` is used.
    """

    def __init__(
        self, low: Transformer | None, high: Transformer | None = None, boundary: float = 1.0
    ) -> None:
        super().__init__()
        self.low = low
        self.high = high
        self.boundary = boundary

    def forward(
        self,
        hidden_states: torch.Tensor,
        timestep: torch.Tensor,
        *,
        high: Sequence[bool] = (),
        **named: Any,
    ) -> Any:
        """Call the network of each example's timestep; return (velocity,).

        Args:
            hidden_states: noisy latents, [batch, ...].
            timestep: [batch].
            high: of two networks, whether each example belongs to the one for high noise.
            named: further arguments.
        """
        if self.low is None or self.high is None:
            network = self.high if self.low is None else self.low
            assert network is not None
            return network(hidden_states=hidden_states, timestep=timestep, **named)
        if all(high) or not any(high):
            network = self.high if high[0] else self.low
            return network(hidden_states=hidden_states, timestep=timestep, **named)
        is_high = torch.tensor(high, device=timestep.device)
        predicted = torch.empty_like(hidden_states[:, : self.low.config.out_channels])
        for network, chosen in ((self.low, ~is_high), (self.high, is_high)):
            part = {
                name: value[chosen] if isinstance(value, torch.Tensor) else value
                for name, value in named.items()
            }
            (found,) = network(
                hidden_states=hidden_states[chosen], timestep=timestep[chosen], **part
            )
            predicted = predicted.to(found.dtype)
            predicted[chosen] = found
        return (predicted,)


def write_lora(transformer: Any, folder: Path, *, high_noise: bool = False) -> None:
    """Write the LoRA of a network into a folder, as three files; the same LoRA, the same bytes.

    Args:
        transformer: with a LoRA, on any device.
        folder: gets the files of `lora_names`.
        high_noise: whether it is Wan 2.2's network for high noise.
    """
    names = lora_names(high_noise=high_noise)
    atomic.write(folder / names.diffusers, lora_bytes(transformer, PREFIX))
    atomic.write(folder / names.musubi, kohya_bytes(transformer, musubi_place))
    atomic.write(folder / names.comfyui, kohya_bytes(transformer, comfyui_place))


def read_lora(transformer: Any, folder: Path, *, high_noise: bool = False) -> None:
    """Put back a LoRA that `write_lora` wrote; a network that has none gets one of its sizes.

    `transformer.disable_adapters()` and `enable_adapters()` then turn it off and on.

    Args:
        transformer: changed in place.
        folder: of the files.
        high_noise: as for `write_lora`.

    Raises:
        TrainingError: it is missing or damaged, or of another network.
    """
    file = folder / lora_names(high_noise=high_noise).diffusers
    load_lora(transformer, file, PREFIX, add_lora)
