"""Checks of models whose caches sd-scripts' own encoders make."""

from __future__ import annotations

from latentmake.config.model_keys import ModelKeys
from latentmake.config.strategies import options_in
from latentmake.config.weights import TextWeights, Weights

_OF_OTHERS = (
    *("unet", "scheduler", "text_projection", "task", "dit", "dit_high_noise", "clip"),
    *("image_encoder", "fp8_t5", "vae_cache_cpu", "clip_skip", "max_token_length"),
    "vae_tiling",
    *("apply_lg_attn_mask", "apply_t5_attn_mask", "ai_training"),
)


def check_strategies(model: ModelKeys) -> None:
    """Refuse keys that sd-scripts' own encoders of an architecture cannot have.

    Raises:
        ValueError: the first such key.
    """
    strategies, title = model.spec.strategies, model.title
    assert strategies is not None
    for name, value in strategies.defaults.items():
        if name != "dtype" and getattr(model, name) != value:
            raise ValueError(f"sd-scripts' own encoders make {title}'s caches: leave out `{name}`")
    if key := model.first_set(*_OF_OTHERS):
        raise ValueError(f"{title} has no `{key}`: leave it out")
    texts = [file.key for file in strategies.files if file.key.startswith("text")]
    if model.text and len(model.text) != len(texts):
        raise ValueError(f"{title} has {len(texts)} text encoder{'s' * (len(texts) != 1)}")
    for kind, dtype in (("latents", "vae_dtype"), ("text", "text_dtype")):
        encoder = strategies.encoder(kind)
        assert encoder is not None
        if encoder.fixed and (getattr(model, dtype) is not None or model.dtype != "bfloat16"):
            raise ValueError(f"sd-scripts decides about {title}'s dtypes: leave out `{dtype}`")
        try:
            options_in(model.further_arguments(kind), encoder.options)
        except ValueError as error:
            raise ValueError(f"`{kind}_arguments`: {error}") from None
    for file in strategies.files:
        _check_place(model.weights(file.key), file.key, title)


def _check_place(weights: Weights | None, key: str, title: str) -> None:
    """Refuse what sd-scripts' loaders cannot be told about weights; missing ones are said later."""
    if weights is None:
        return
    unused = ["config"]
    if isinstance(weights, TextWeights):
        unused += ["tokenizer", "max_length", "projection"]
    for name in unused:
        if getattr(weights, name) is not None:
            raise ValueError(
                f"`{key}`: leave out `{name}`; what sd-scripts can be told is `text_arguments`"
            )
