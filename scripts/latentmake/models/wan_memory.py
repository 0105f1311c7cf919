"""Memory that training a LoRA of Wan's network takes on a device, from sizes alone.

Sources of the numbers: weights and optimizer states are counted from shapes. Activations were
counted on diffusers' WanTransformer3DModel with peft's LoRA: every tensor alive in a step was added
up, with networks of Wan's real sizes, 64 to 512 text tokens, ranks 32 and 128, and several choices
of layers (the tests repeat it). The number of saved values per token and block is an integer
multiple of the blocks' width, up to 1 percent. Not counted: what the device itself takes (about 0.5
GB of a CUDA context) and what its allocator cannot use (usually under a tenth).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from latentmake.models.wan_shapes import IN_BLOCK, DitShapes

# Parts of names of what stays in float32; diffusers' `_keep_in_fp32_modules` of the network.
_EXACT = {"time_embedder", "scale_shift_table", "norm1", "norm2", "norm3"}
# Bytes of an optimizer's state for each trained number; 8: two moments in float32.
_STATES = {"adamw": 8, "adamw8bit": 2, "lion": 4, "prodigy": 16, "dadaptation": 16}
_TEXT_SIDE = ("attn2.to_k", "attn2.to_v", "attn2.add_k_proj", "attn2.add_v_proj")


class _Saved(NamedTuple):
    """Values that one block keeps for its backward pass, in numbers of one precision.

    Attributes:
        size: bytes of a number.
        widths: block's widths per token; layers of the attention with a LoRA share their inputs,
            which count.
        text: block's widths per text token.
        outside: block's widths per token, once: the output's norm and modulation.
        backward: widths at least that a block's backward pass takes besides.
    """

    size: int
    widths: int
    text: int
    outside: int
    backward: int


_HALF = _Saved(size=2, widths=20, text=4, outside=2, backward=9)
_FLOAT = _Saved(size=4, widths=14, text=3, outside=1, backward=4)


class TrainingMemory(NamedTuple):
    """Bytes on a device while training.

    Attributes:
        weights: of the frozen network.
        lora: its weights, their gradients, and their copies for autocast and EMA.
        optimizer: its state.
        activations: at the peak of a step.
    """

    weights: int
    lora: int
    optimizer: int
    activations: int

    @property
    def total(self) -> int:
        """All of it."""
        return sum(self)


def lora_parameters(dit: DitShapes, layers: Sequence[str], rank: int) -> int:
    """Return the number of trained parameters of a LoRA on some layers."""
    tensors = dit.tensors()
    return sum(rank * sum(tensors[f"{layer}.weight"]) for layer in layers)


def training_memory(
    dit: DitShapes,
    *,
    latent: tuple[int, int, int],
    layers: Sequence[str],
    rank: int,
    batch: int = 1,
    text_tokens: int = 512,
    half: bool = True,
    gradient_checkpointing: bool = True,
    optimizer: str = "adamw",
    ema: bool = False,
) -> TrainingMemory:
    """Return the memory of one device that trains a LoRA.

    Args:
        dit: sizes of the network.
        latent: frames, height and width of the largest latents.
        layers: that get a LoRA, as `check_targets` returns them.
        rank: of the LoRA.
        batch: items of a device's step, without accumulation, which costs none.
        text_tokens: of the longest text, with an image encoder's tokens if any.
        half: bfloat16 or float16 with autocast; else float32.
        gradient_checkpointing: keep the input of each block alone, and compute the rest again.
        optimizer: its name in the configuration.
        ema: whether the weights' EMA is kept.
    """
    saved = _HALF if half else _FLOAT
    trained = lora_parameters(dit, layers, rank)
    copies = 8 + (2 if half else 0) + (4 if ema else 0)  # weight, gradient; autocast's; EMA's
    tokens = batch * math.prod(size // step for size, step in zip(latent, dit.patch, strict=True))
    block = _saved_by_block(dit, layers, rank, tokens, batch * text_tokens, saved)
    kept = dit.layers * block
    if gradient_checkpointing:
        kept = dit.layers * tokens * dit.dim * saved.size + block
    values = 6 * math.prod(dit.patch) * dit.out_channels * 4  # of a token's prediction and loss
    outside = tokens * (saved.outside * dit.dim * saved.size + values)
    backward = tokens * saved.size * _backward_widths(dit, layers, saved)
    return TrainingMemory(
        weights=_weight_bytes(dit, saved.size),
        lora=trained * copies,
        optimizer=trained * _STATES[optimizer],
        activations=kept + outside + backward,
    )


def _weight_bytes(dit: DitShapes, size: int) -> int:
    return sum(
        math.prod(shape) * (4 if _EXACT & set(name.split(".")) else size)
        for name, shape in dit.tensors().items()
    )


def _saved_by_block(
    dit: DitShapes, layers: Sequence[str], rank: int, tokens: int, text: int, saved: _Saved
) -> int:
    """Return the bytes that the block with the most LoRAs keeps for its backward pass."""
    inputs = {"ffn.net.0.proj": dit.dim, "ffn.net.2": dit.ffn_dim}
    found = 0
    for own in _by_block(layers):
        on_tokens = [layer for layer in own if not layer.endswith(_TEXT_SIDE)]
        wide = sum(inputs[end] for end in inputs for layer in own if layer.endswith(end))
        per_token = saved.widths * dit.dim + dit.ffn_dim + wide + rank * len(on_tokens)
        found = max(found, saved.size * (tokens * per_token + text * saved.text * dit.dim))
    return found


def _backward_widths(dit: DitShapes, layers: Sequence[str], saved: _Saved) -> int:
    """Return the numbers per token that a block's backward pass holds besides what it saved.

    The most is held where the feed-forward part, several times as wide as the rest, is derived; a
    LoRA before it alone adds to that.
    """
    ends = [any(layer.endswith(end) for layer in layers) for end in ("ffn.net.0.proj", "ffn.net.2")]
    first_alone = ends == [True, False]
    return max(saved.backward * dit.dim, 2 * dit.ffn_dim + (2 * dit.dim if first_alone else 0))


def _by_block(layers: Sequence[str]) -> list[list[str]]:
    """Group layers by their block."""
    found: dict[str, list[str]] = {}
    for layer in layers:
        match = IN_BLOCK.match(layer)
        found.setdefault(match[1] if match else "", []).append(layer)
    return list(found.values())
