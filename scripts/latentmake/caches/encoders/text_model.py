"""Networks, tokenizers and projections of text encoders: transformers' CLIP, T5 and UMT5."""

from __future__ import annotations

import json
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
from latentmake.caches.encoders.projection import load_projection
from latentmake.config import TextWeights
from latentmake.errors import ModelError, first_line
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
        projection = _projection(weights)
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
                mend="name the folder of its config.json as `config`",
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


def _projection(weights: TextWeights) -> torch.nn.Module | None:
    """Load the projection of a text encoder's embeddings for inference, if it has one.

    A linear layer's weights need no code. A pipeline with a projection class of its own is loaded
    with the Python files in its folder, and only if the configuration trusts them by name.
    """
    if weights.projection is None:
        return None
    if not weights.trust_remote_code:
        return load_projection(weights.projection).eval().requires_grad_(False)
    import diffusers  # seconds of import, for this alone

    loader: Any = diffusers.DiffusionPipeline  # which has no types
    folder = Path(weights.projection)
    hint = "name the folder of a diffusers pipeline with pipeline.py and its projection"
    try:
        index = json.loads((folder / "model_index.json").read_bytes())
        names = [name for name, each in index.items() if isinstance(each, list)]
        (name,) = (each for each in names if "projection" in each)
        pipeline = loader.from_pretrained(
            str(folder),
            custom_pipeline=str(folder),
            trust_remote_code=True,
            local_files_only=True,
            dtype=torch.float32,
            **{each: None for each in names if each != name},
        )
        layer = getattr(pipeline, name)
    except Exception as error:  # code of others may fail in any way
        raise ModelError(
            f"its projection cannot be loaded ({first_line(error)})", where=folder, mend=hint
        ) from None
    if not isinstance(layer, torch.nn.Module):
        raise ModelError(f"its `{name}` is not a network", where=folder, mend=hint)
    return layer.eval().requires_grad_(False)
