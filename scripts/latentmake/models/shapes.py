"""Shapes of what a model's encoders make, read from the files beside its weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from latentmake.config.weights import TextWeights, Weights
from latentmake.errors import ConfigError, ModelError
from latentmake.files.safetensors import read_head
from latentmake.models.files import T5_LENGTH, network_config, projection_file, vae_factor


class Latents(NamedTuple):
    """Properties of a VAE's latents.

    Attributes:
        channels: of a latent.
        factor: its width in pixels.
        scaling: factor that a network expects them to be multiplied by.
        shift: number that it expects to be subtracted before.
    """

    channels: int
    factor: int
    scaling: float
    shift: float


class Tokens(NamedTuple):
    """Number of tokens of an embedding.

    Attributes:
        longest: upper limit.
        padded: whether each has just as many (CLIP), or its caption's own number (T5).
    """

    longest: int
    padded: bool


class Text(NamedTuple):
    """Embeddings of one text encoder: ending of ai-training's files, tokens, width of each."""

    ending: str
    tokens: Tokens
    width: int


def latents_shape(weights: Weights) -> Latents | None:
    """Return the properties of a VAE's latents; None where no configuration on this disk says.

    Defaults are those of diffusers' AutoencoderKL.

    Raises:
        ModelError: the configuration cannot be read.
    """
    config, factor = network_config(weights), vae_factor(weights)
    if config is None or factor is None:
        return None
    return Latents(
        channels=config.get("latent_channels") or 4,
        factor=factor,
        scaling=float(config.get("scaling_factor", 0.18215) or 1.0),
        shift=float(config.get("shift_factor") or 0.0),
    )


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


def text_shape(weights: TextWeights, ending: str, unet: Weights | None) -> Text | None:
    """Return what files of a text encoder hold; None where no file here says.

    A projection of a class of its own gives the width that the UNet attends to.

    Raises:
        ModelError: a configuration or the projection cannot be read.
    """
    tokens, width = text_tokens(weights), text_width(weights)
    if width is None and weights.projection is not None and unet is not None:
        attended = (network_config(unet) or {}).get("cross_attention_dim")
        width = attended if isinstance(attended, int) else None
    return None if tokens is None or width is None else Text(ending, tokens, width)


def unknown_shape(where: str) -> ConfigError:
    """Return the error for a network of which no file here tells what it makes."""
    what = "no config.json on this disk says what its caches are like"
    hint = "name a folder that has one as `path`, or the file as `config`"
    return ConfigError(what, where=where, hint=hint)


def _text_config(weights: TextWeights) -> dict[str, Any] | None:
    """Return a text encoder's configuration; of a complete CLIP, that of its text half."""
    config = network_config(weights)
    return None if config is None else {**config, **(config.get("text_config") or {})}
