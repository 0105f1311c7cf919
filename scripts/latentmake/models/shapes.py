"""The shapes that a model's encoders give, read off their configurations: no network is loaded.

Whoever takes a cache that another program made must know what ours would look like.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from latentmake.config import TextWeights, Weights
from latentmake.errors import ModelError
from latentmake.files.safetensors import read_head
from latentmake.models.files import config_file, projection_file, vae_factor

__all__ = [
    "T5_LENGTH",
    "Latents",
    "Tokens",
    "attended_width",
    "latents_shape",
    "text_tokens",
    "text_width",
]

T5_LENGTH = 512
"""Tokens kept of a caption for T5, as SD3, Flux and Wan do."""


class Latents(NamedTuple):
    """What a VAE's latents are like.

    Attributes:
        channels: of a latent.
        factor: how many pixels wide one is.
        scaling: what a network expects them to be multiplied by.
        shift: what it expects to be subtracted before.
    """

    channels: int
    factor: int
    scaling: float
    shift: float


class Tokens(NamedTuple):
    """How many tokens an embedding has.

    Attributes:
        longest: at most so many.
        padded: whether it has always just as many (CLIP), or its caption's own number (T5).
    """

    longest: int
    padded: bool


def latents_shape(weights: Weights) -> Latents | None:
    """Return what a VAE's latents are like; None where no configuration on this disk says.

    Defaults are those of diffusers' AutoencoderKL.

    Raises:
        ModelError: the configuration cannot be read.
    """
    config = _config(weights)
    factor = None if config is None else vae_factor(weights)
    if config is None or factor is None:
        return None
    return Latents(
        channels=int(config.get("latent_channels", 4)),
        factor=factor,
        scaling=float(config.get("scaling_factor", 0.18215) or 1.0),
        shift=float(config.get("shift_factor") or 0.0),
    )


def text_width(weights: TextWeights) -> int | None:
    """Return how wide a text encoder's embeddings are; None where no file here says.

    Raises:
        ModelError: the configuration or the projection cannot be read.
    """
    if weights.projection is not None:
        # A class of its own may do anything; a linear layer's weight is [width, its input].
        return None if weights.trust_remote_code else _projected_width(weights.projection)
    config = _text_config(weights)
    if config is None:
        return None
    return int(config.get("hidden_size", config.get("d_model", 512)))


def _projected_width(projection: str) -> int:
    file = projection_file(projection)
    try:
        (shape,) = (x.shape for x in read_head(file).tensors.values() if len(x.shape) == 2)
    except (OSError, ValueError):
        raise ModelError(
            "is no linear projection", where=file, mend="name the file of a linear layer"
        ) from None
    return int(shape[0])


def attended_width(unet: Weights) -> int | None:
    """Return how wide the embeddings are that a UNet attends to; None where no file here says.

    Raises:
        ModelError: the configuration cannot be read.
    """
    config = _config(unet) or {}
    width = config.get("cross_attention_dim")
    return width if isinstance(width, int) else None


def text_tokens(weights: TextWeights) -> Tokens | None:
    """Return how many tokens a text encoder's embeddings have; None as above.

    Raises:
        ModelError: the configuration cannot be read.
    """
    config = _text_config(weights)
    if config is None:
        return None
    if not str(config.get("model_type", "")).startswith("clip"):
        return Tokens(weights.max_length or T5_LENGTH, padded=False)
    limit = int(config.get("max_position_embeddings", 77))
    return Tokens(min(weights.max_length or limit, limit), padded=True)


def _config(weights: Weights) -> dict[str, Any] | None:
    path = None if weights.hub is not None else config_file(weights)
    if path is None:
        return None
    try:
        found = json.loads(path.read_bytes())
        if not isinstance(found, dict):
            raise ValueError("it is no JSON object")
    except (OSError, ValueError) as error:
        raise ModelError(
            f"cannot be read ({error})", where=path, mend="copy the model again"
        ) from None
    return found


def _text_config(weights: TextWeights) -> dict[str, Any] | None:
    """Return a text encoder's configuration; of a whole CLIP, that of its text half."""
    config = _config(weights)
    return None if config is None else {**config, **(config.get("text_config") or {})}
