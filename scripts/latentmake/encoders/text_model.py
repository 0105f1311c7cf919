"""The networks of text encoders: any CLIP, T5 or UMT5 encoder of transformers, whole or refused."""

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

from latentmake import tokens
from latentmake.config import TextWeights
from latentmake.encoders.projection import load_text_projection
from latentmake.encoders.state import LOAD_FAULTS, refusal
from latentmake.errors import ModelError
from latentmake.weights import config_file, weights_files

__all__ = ["Kind", "TextModel", "is_clip", "load_text_model"]

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
    """A text encoder's network, ready for inference, with what stands before and behind it.

    Attributes:
        network: on its device.
        tokenizer: what cuts a caption into tokens.
        projection: what the hidden states go through at last; None leaves them as they are.
    """

    network: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    projection: torch.nn.Module | None


def is_clip(network: PreTrainedModel) -> bool:
    """Whether a text encoder's network is a CLIP's."""
    return str(network.config.model_type).startswith("clip")


def load_text_model(
    weights: TextWeights, device: torch.device, dtype: torch.dtype, kind: Kind | None = None
) -> TextModel:
    """Load a text encoder's network, its tokenizer and its projection.

    Args:
        weights: where they lie.
        device: where it shall run.
        dtype: in what it shall compute.
        kind: what it must be; None: as its configuration says.

    Raises:
        ModelError: something is missing, incomplete or of another kind.
    """
    try:
        network = _load(weights, dtype, kind)
        tokenizer = tokens.load(weights)
        projection = load_text_projection(weights)
    except LOAD_FAULTS as error:
        mend = f"name the folder of a {kind or 'CLIP, T5 or UMT5'} encoder, all of it"
        raise refusal(error, weights, "a text encoder", mend) from None
    return TextModel(
        network.to(device=device, dtype=dtype).eval().requires_grad_(False),
        tokenizer,
        None if projection is None else projection.to(device=device, dtype=dtype),
    )


def _model_class(config: Any, kind: Kind | None) -> type[PreTrainedModel]:
    for name in (*(config.architectures or ()), config.model_type):
        if name in _CLASSES:
            found = _CLASSES[name]
            break
    else:
        raise ValueError(f"its model_type is {config.model_type}, not clip, t5 or umt5")
    clip = found in (CLIPTextModel, CLIPTextModelWithProjection)
    if kind is not None and clip != kind.startswith("CLIP"):
        raise ValueError(f"its model_type is {config.model_type}")
    return CLIPTextModelWithProjection if kind == "CLIP with its projection" else found


def _load(weights: TextWeights, dtype: torch.dtype, kind: Kind | None) -> PreTrainedModel:
    if weights.hub is not None:
        place = {"revision": weights.revision, "subfolder": weights.subfolder or ""}
        config = AutoConfig.from_pretrained(weights.hub, **place)
        return _checked(_model_class(config, kind), weights.hub, dtype, **place)
    files = weights_files(weights)
    config_path = config_file(weights)
    if config_path is None:
        raise ModelError(
            "a single file does not say what network it holds",
            where=weights.path or "",
            mend="name the folder of its config.json as `config`",
        )
    config = AutoConfig.from_pretrained(config_path.parent, local_files_only=True)
    model_class = _model_class(config, kind)
    path = Path(weights.path or "")
    if path.is_dir():
        return _checked(model_class, str(path), dtype, local_files_only=True)
    model = model_class(config)
    missing, _ = model.load_state_dict(_named_for(model, load_file(files[-1])), strict=False)
    _refuse_missing(model, list(missing))
    return model


def _named_for(model: PreTrainedModel, state: dict[str, Any]) -> dict[str, Any]:
    """Return weights under a network's names: CLIP's stand in files with a prefix or without."""
    if any(name.startswith(_PREFIX) for name in model.state_dict()):
        return state
    return {name.removeprefix(_PREFIX): value for name, value in state.items()}


def _checked(
    model_class: type[PreTrainedModel], place: str, dtype: torch.dtype, **options: Any
) -> PreTrainedModel:
    """Load a network as transformers does, but refuse weights that it would make up."""
    model, info = model_class.from_pretrained(
        place, dtype=dtype, output_loading_info=True, **options
    )
    _refuse_missing(model, list(info["missing_keys"]))
    return model


def _refuse_missing(model: PreTrainedModel, missing: list[str]) -> None:
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    lacking = [name for name in missing if name not in tied and not name.endswith("position_ids")]
    if lacking:
        raise ValueError(f"the weights lack {lacking[0]} and {len(lacking) - 1} more")
