"""Wan's network for training: loaded from any of its forms, and given a LoRA."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from diffusers import WanTransformer3DModel

from latentmake.caches.encoders.local_state import fill, local_state, refusing, without_weights
from latentmake.config.weights import Weights
from latentmake.errors import ModelError
from latentmake.training.lora import add_adapter
from latentmake.training.wan.dit import HINT, IGNORED, check_targets, read_dit, to_diffusers

Transformer: TypeAlias = Any  # a WanTransformer3DModel: diffusers and peft have no types
_Transformer: Transformer = WanTransformer3DModel


def load_transformer(
    path: str,
    *,
    dtype: torch.dtype = torch.bfloat16,
    where: str = "",
) -> Transformer:
    """Load Wan's network on the CPU, frozen.

    Weights that have their dtype already are mapped from the files; others take memory once. What
    diffusers keeps in float32 (`_keep_in_fp32_modules`) is float32 whatever the dtype.

    Args:
        path: a diffusers folder, of the network or its pipeline; a folder of the original release;
            or a .safetensors file in diffusers' or the original names.
        dtype: of the other weights.
        where: key of the path in the configuration, for messages.

    Raises:
        ModelError: it is missing, damaged, incomplete, or no DiT that can be trained.
    """
    try:
        return _load(path, dtype)
    except ModelError as error:
        if not where:
            raise
        what = f"{error.where}: {error.what}" if error.where else error.what
        raise ModelError(what, where=where, hint=error.hint) from None


def _load(path: str, dtype: torch.dtype) -> Transformer:
    dit = read_dit(path)
    weights = Weights(path=str(dit.place))
    with refusing(weights, "Wan's DiT", HINT):
        state = {
            to_diffusers(name): value
            for name, value in local_state(weights).items()
            if IGNORED not in name
        }
        transformer = without_weights(_Transformer, dit.config)
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
    where: str = "trainer.target_modules",
) -> None:
    """Freeze a network and add a float32 LoRA to it; see `add_adapter`.

    Args:
        transformer: changed in place.
        rank: of the LoRA.
        target_modules: layers, by their names or the ends of these.
        alpha: of the LoRA.
        autocast: see there.
        where: key of `target_modules`, for messages.

    Raises:
        TrainingError: one of `target_modules` fits no linear layer of a block.
    """
    shapes = {name: tuple(each.shape) for name, each in transformer.named_parameters()}
    check_targets(target_modules, shapes, where)
    add_adapter(
        transformer, rank=rank, alpha=alpha, target_modules=target_modules, autocast=autocast
    )
