"""Shapes of text embeddings, derived from the configuration of their encoders."""

from __future__ import annotations

from typing import Any, NamedTuple

from latentmake.base.errors import ModelError
from latentmake.config.weights import TextWeights
from latentmake.formats.safetensors import read_head
from latentmake.models.files import T5_LENGTH, network_config, projection_file


class Tokens(NamedTuple):
    """Number of tokens in the embeddings of a text encoder.

    Attributes:
        longest: upper limit.
        padded: whether all embeddings have `longest` tokens (CLIP), or as many as their captions
            (T5).
    """

    longest: int
    padded: bool


def text_width(weights: TextWeights) -> int | None:
    """Return the width of an encoder's embeddings; None if no file says it; raises ModelError."""
    if weights.projection is None:
        if (config := _text_config(weights)) is None:
            return None
        return int(config.get("hidden_size") or config.get("d_model") or 512)
    if weights.trust_remote_code:  # custom code may return any width
        return None
    return projection_shape(weights.projection)[0]


def projection_shape(path: str) -> tuple[int, int]:
    """Return the output width and the input width of a text projection; raises ModelError."""
    file = projection_file(path)
    try:
        tensors = read_head(file).tensors.values()
        ((gives, takes),) = (tensor.shape for tensor in tensors if len(tensor.shape) == 2)
    except (OSError, ValueError):
        what, hint = "is no linear projection", "name the file of a linear layer"
        raise ModelError(what, where=file, hint=hint) from None
    return gives, takes


def text_tokens(weights: TextWeights) -> Tokens | None:
    """Return the tokens of an encoder's embeddings; None if no file says it; raises ModelError."""
    config = _text_config(weights)
    if config is None:
        return None
    if not str(config.get("model_type", "")).startswith("clip"):
        return Tokens(weights.max_length or T5_LENGTH, padded=False)
    limit = config.get("max_position_embeddings") or 77
    return Tokens(min(weights.max_length or limit, limit), padded=True)


def _text_config(weights: TextWeights) -> dict[str, Any] | None:
    """Return the configuration of a text encoder; for a complete CLIP, of its text half."""
    config = network_config(weights)
    return None if config is None else {**config, **(config.get("text_config") or {})}
