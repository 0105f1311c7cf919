"""Networks, tokenizers and projections of text encoders: transformers' CLIP, T5 and UMT5."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import torch
from transformers import (
    AutoConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    PreTrainedModel,
    T5EncoderModel,
    UMT5EncoderModel,
)

from latentmake.caches.encoders.local_state import (
    State,
    fill,
    local_state,
    place,
    pretrained,
    refusing,
    without_weights,
)
from latentmake.caches.encoders.projection import text_projection
from latentmake.caches.tokenizers import TokenCache, load
from latentmake.config.weights import TextWeights, Weights
from latentmake.errors import ModelError
from latentmake.models.checkpoints import part_of, prefix_of
from latentmake.models.files import network_config, weights_files

Kind = Literal["CLIP", "CLIP with its projection", "T5"]

_CLASSES: dict[str, type[PreTrainedModel]] = {
    "t5": T5EncoderModel,
    "umt5": UMT5EncoderModel,
    "clip": CLIPTextModel,
    "clip_text_model": CLIPTextModel,
    "CLIPTextModelWithProjection": CLIPTextModelWithProjection,
}
_PREFIX = "text_model."


class TextModel(NamedTuple):
    """A text encoder, ready for inference."""

    network: PreTrainedModel
    tokens: TokenCache
    projection: torch.nn.Module | None


def load_text_model(
    weights: TextWeights, device: torch.device, dtype: torch.dtype, kind: Kind | None = None
) -> TextModel:
    """Load a text encoder's network, tokenizer and projection; of any kind if `kind` is None.

    Raises:
        ModelError: something is missing, incomplete or of another kind.
    """
    hint = f"name the folder of a {kind or 'CLIP, T5 or UMT5'} encoder, with all its files"
    with refusing(weights, "a text encoder", hint):
        network = _load(weights, dtype, kind)
        tokens = TokenCache(load(weights))
        projection = text_projection(weights)
    return TextModel(
        place(network, device, dtype),
        tokens,
        None if projection is None else projection.to(device=device, dtype=dtype),
    )


def _class_of(config: Mapping[str, Any], kind: Kind | None) -> type[PreTrainedModel]:
    names = (*(config.get("architectures") or ()), config.get("model_type"))
    found = next((_CLASSES[name] for name in names if name in _CLASSES), None)
    clip = found in (CLIPTextModel, CLIPTextModelWithProjection)
    if found is None or (kind is not None and clip != kind.startswith("CLIP")):
        raise ValueError(f"its model_type is {names[-1]}")
    return CLIPTextModelWithProjection if kind == "CLIP with its projection" else found


def _load(weights: TextWeights, dtype: torch.dtype, kind: Kind | None) -> PreTrainedModel:
    model: PreTrainedModel
    if weights.hub is not None:
        place = {"revision": weights.revision, "subfolder": weights.subfolder or ""}
        config = AutoConfig.from_pretrained(weights.hub, **place).to_dict()
        model = pretrained(_class_of(config, kind).from_pretrained, weights, dtype=dtype)
        return model
    weights_files(weights)  # names what is missing
    known = network_config(weights)
    if known is None:
        raise ModelError(
            "a single file does not say what network it holds",
            where=weights.path or "",
            hint="name the folder of its config.json as `config`",
        )
    model = without_weights(_class_of(known, kind), known)
    state = _part(weights, model, local_state(weights))
    own: State = {}
    for name in model.state_dict():
        # CLIP's names come with this prefix or without.
        for other in (name.removeprefix(_PREFIX), f"{_PREFIX}{name}", name):
            own |= {name: state[other]} if other in state else {}
    fill(model, own)
    return model


def _part(weights: Weights, model: PreTrainedModel, state: State) -> State:
    """Return the weights of a text encoder: of a checkpoint its part's, else all as they are."""
    part = part_of(weights)
    prefix = part and prefix_of(part, state)
    if not prefix:
        return state
    if not prefix.endswith("model."):
        return {x.removeprefix(prefix): state[x] for x in state if x.startswith(prefix)}
    from diffusers.loaders.single_file_utils import convert_open_clip_checkpoint

    converted: State = convert_open_clip_checkpoint(model, state, prefix=prefix)
    return converted
