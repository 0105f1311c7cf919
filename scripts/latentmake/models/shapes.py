"""Shapes of what a model's encoders make, read from the files beside its weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from latentmake.config.weights import TextWeights, Weights
from latentmake.errors import ModelError
from latentmake.files.safetensors import read_head
from latentmake.models.files import T5_LENGTH, network_config, projection_file


class Tokens(NamedTuple):
    """Number of tokens of an embedding.

    Attributes:
        longest: upper limit.
        padded: whether each has just as many (CLIP), or its caption's own number (T5).
    """

    longest: int
    padded: bool


def latent_channels(weights: Weights) -> int | None:
    """Return the channels of a VAE's latents; None where no configuration on this disk has them.

    Raises:
        ModelError: the configuration cannot be read.
    """
    return (network_config(weights) or {}).get("latent_channels")


def text_width(weights: TextWeights) -> int | None:
    """Return the width of a text encoder's embeddings; None where no file here says.

    Raises:
        ModelError: the configuration or the projection cannot be read.
    """
    if weights.projection is not None:
        # A class of its own may do anything; a linear layer's weight is [width, its input].
        return None if weights.trust_remote_code else _projected_width(weights.projection)
    config = _text_config(weights)
    return None if config is None else _hidden_size(config)


def _hidden_size(config: Mapping[str, Any]) -> int:
    return int(config.get("hidden_size") or config.get("d_model") or 512)


def _projected_width(projection: str) -> int:
    file = projection_file(projection)
    try:
        tensors = read_head(file).tensors.values()
        (shape,) = (each.shape for each in tensors if len(each.shape) == 2)
    except (OSError, ValueError):
        raise ModelError(
            "is no linear projection", where=file, hint="name the file of a linear layer"
        ) from None
    return int(shape[0])


def text_tokens(weights: TextWeights) -> Tokens | None:
    """Return the number of tokens of a text encoder's embeddings; None as above.

    Raises:
        ModelError: the configuration cannot be read.
    """
    config = _text_config(weights)
    if config is None:
        return None
    if not str(config.get("model_type", "")).startswith("clip"):
        return Tokens(weights.max_length or T5_LENGTH, padded=False)
    limit = config.get("max_position_embeddings") or 77
    return Tokens(min(weights.max_length or limit, limit), padded=True)


def _text_config(weights: TextWeights) -> dict[str, Any] | None:
    """Return a text encoder's configuration; of a complete CLIP, that of its text half."""
    config = network_config(weights)
    return None if config is None else {**config, **(config.get("text_config") or {})}
