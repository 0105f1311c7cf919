"""Networks, tokenizers and projections of text encoders: transformers' CLIP, T5 and UMT5."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from safetensors.torch import load_file
from transformers import (
    AutoConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    T5EncoderModel,
    UMT5EncoderModel,
)

from latentmake.caches.encoders.local_state import pretrained, refuse_faults, refusing
from latentmake.caches.encoders.projection import text_projection
from latentmake.config import TextWeights
from latentmake.errors import ModelError
from latentmake.models import tokenizers
from latentmake.models.files import config_file, weights_files

__all__ = ["Kind", "TextModel", "load_text_model"]

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
    tokenizer: PreTrainedTokenizerBase
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
        tokenizer = tokenizers.load(weights)
        projection = text_projection(weights)
    return TextModel(
        network.to(device=device, dtype=dtype).eval().requires_grad_(False),
        tokenizer,
        None if projection is None else projection.to(device=device, dtype=dtype),
    )


def _model_class(config: Any, kind: Kind | None) -> type[PreTrainedModel]:
    names = (*(config.architectures or ()), config.model_type)
    found = next((_CLASSES[name] for name in names if name in _CLASSES), None)
    clip = found in (CLIPTextModel, CLIPTextModelWithProjection)
    if found is None or (kind is not None and clip != kind.startswith("CLIP")):
        raise ValueError(f"its model_type is {config.model_type}")
    return CLIPTextModelWithProjection if kind == "CLIP with its projection" else found


def _load(weights: TextWeights, dtype: torch.dtype, kind: Kind | None) -> PreTrainedModel:
    if weights.hub is not None:
        config = AutoConfig.from_pretrained(
            weights.hub, revision=weights.revision, subfolder=weights.subfolder or ""
        )
    else:
        files, config_path = weights_files(weights), config_file(weights)
        if config_path is None:
            raise ModelError(
                "a single file does not say what network it holds",
                where=weights.path or "",
                hint="name the folder of its config.json as `config`",
            )
        config = AutoConfig.from_pretrained(config_path.parent, local_files_only=True)
    model_class = _model_class(config, kind)
    if not Path(weights.path or "").is_file():
        loaded: PreTrainedModel = pretrained(model_class.from_pretrained, weights, dtype=dtype)
        return loaded
    model = model_class(config)
    state = load_file(files[-1])
    if not any(name.startswith(_PREFIX) for name in model.state_dict()):
        # CLIP's names come with this prefix or without.
        state = {name.removeprefix(_PREFIX): value for name, value in state.items()}
    missing, _ = model.load_state_dict(state, strict=False)
    refuse_faults(name for name in missing if name not in (model.all_tied_weights_keys or ()))
    return model
