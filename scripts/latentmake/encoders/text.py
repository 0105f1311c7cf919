"""The text encoders: any CLIP, T5 or UMT5 encoder of transformers, with its tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
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

from latentmake.config import TextWeights
from latentmake.encoders.projection import load_text_projection
from latentmake.encoders.tokenizer import load_tokenizer
from latentmake.errors import ModelError
from latentmake.shapes import T5_LENGTH
from latentmake.weights import config_file, weights_files

__all__ = ["TextEncoder", "load_text_encoder"]


@dataclass(frozen=True)
class TextEncoder:
    """A text encoder with its tokenizer.

    Attributes:
        model: the network.
        tokenizer: what cuts a caption into tokens.
        padded: whether every caption is filled up to `max_length` tokens (CLIP, whose padding the
            UNet attends to) or kept at its own length (T5).
        max_length: tokens kept of a caption.
        projection: what the hidden states go through at last; None leaves them as they are.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    padded: bool
    max_length: int
    projection: torch.nn.Module | None = None

    def count_tokens(self, caption: str) -> int:
        """Return how many tokens a caption has, those cut off and special ones included."""
        return len(self.tokenizer(caption, truncation=False, verbose=False)["input_ids"])

    @torch.inference_mode()
    def encode(self, captions: Sequence[str]) -> list[dict[str, torch.Tensor]]:
        """Encode captions.

        Returns:
            For each: `hidden_state` [T, D], the last hidden state of its tokens (through the
            projection, if any), and for CLIP `pooled` [D], the vector of its last token (projected
            where the network projects it); float32, on the CPU.
        """
        tokens = self.tokenizer(
            list(captions),
            padding="max_length" if self.padded else "longest",
            max_length=self.max_length,
            padding_side="right",
            truncation=True,
            return_tensors="pt",
        ).to(self.model.device)
        if not self.padded:
            _give_one_token(tokens, self.tokenizer.pad_token_id or 0)
        # CLIP was trained without a mask over its padding; Stable Diffusion uses none either.
        mask = None if self.padded else tokens.attention_mask
        output = self.model(input_ids=tokens.input_ids, attention_mask=mask)
        hidden = output.last_hidden_state
        if self.projection is not None:
            hidden = self.projection(hidden)
        hidden = hidden.float().cpu()
        if not self.padded:
            lengths = tokens.attention_mask.sum(dim=1).tolist()
            return [
                {"hidden_state": row[:length].clone()}
                for row, length in zip(hidden, lengths, strict=True)
            ]
        pooled = output.text_embeds if "text_embeds" in output else output.pooler_output
        pooled = pooled.float().cpu()
        return [
            {"hidden_state": row.clone(), "pooled": vector.clone()}
            for row, vector in zip(hidden, pooled, strict=True)
        ]


def _give_one_token(tokens: Any, padding: int) -> None:
    """Let a caption without any token, as an empty one may be, have one: padding."""
    if tokens.input_ids.shape[1] == 0:
        shape = (len(tokens.input_ids), 1)
        tokens["input_ids"] = torch.full(shape, padding, device=tokens.input_ids.device).long()
        tokens["attention_mask"] = torch.ones_like(tokens["input_ids"])
    tokens["attention_mask"][:, 0] = 1


_CLASSES: dict[str, type[PreTrainedModel]] = {
    "t5": T5EncoderModel,
    "umt5": UMT5EncoderModel,
    "clip": CLIPTextModel,
    "clip_text_model": CLIPTextModel,
    "CLIPTextModelWithProjection": CLIPTextModelWithProjection,
}


def _model_class(config: Any) -> type[PreTrainedModel]:
    for name in (*(config.architectures or ()), config.model_type):
        if name in _CLASSES:
            return _CLASSES[name]
    raise ValueError(f"its model_type is {config.model_type}, not clip, t5 or umt5")


def load_text_encoder(
    weights: TextWeights, device: torch.device, dtype: torch.dtype
) -> TextEncoder:
    """Load a text encoder and its tokenizer for inference.

    Args:
        weights: where they lie.
        device: where it shall run.
        dtype: in what it shall compute.

    Raises:
        ModelError: something is missing, incomplete or of another kind.
    """
    where = weights.path or weights.hub or ""
    try:
        model = _load_model(weights, dtype)
        tokenizer = load_tokenizer(weights)
        projection = load_text_projection(weights)
    except (OSError, ValueError, KeyError, RuntimeError, TypeError, SafetensorError) as error:
        raise ModelError(
            f"cannot be loaded as a text encoder ({str(error).strip().splitlines()[0]})",
            where=where,
            mend="name the folder of a CLIP, T5 or UMT5 encoder, and see that it is complete",
        ) from None
    padded = model.config.model_type.startswith("clip")
    text_config = getattr(model.config, "text_config", model.config)
    limit = text_config.max_position_embeddings if padded else T5_LENGTH
    return TextEncoder(
        model=model.to(device=device, dtype=dtype).eval().requires_grad_(False),
        tokenizer=tokenizer,
        padded=padded,
        max_length=min(weights.max_length or limit, limit)
        if padded
        else weights.max_length or limit,
        projection=None if projection is None else projection.to(device=device, dtype=dtype),
    )


def _load_model(weights: TextWeights, dtype: torch.dtype) -> PreTrainedModel:
    if weights.hub is not None:
        place = {"revision": weights.revision, "subfolder": weights.subfolder or ""}
        config = AutoConfig.from_pretrained(weights.hub, **place)
        return _checked(_model_class(config), weights.hub, dtype, **place)
    files = weights_files(weights)
    config_path = config_file(weights)
    if config_path is None:
        raise ModelError(
            "a single file does not say what network it holds",
            where=weights.path or "",
            mend="name the folder of its config.json as `config`",
        )
    config = AutoConfig.from_pretrained(config_path.parent, local_files_only=True)
    model_class = _model_class(config)
    path = Path(weights.path or "")
    if path.is_dir():
        return _checked(model_class, str(path), dtype, local_files_only=True)
    model = model_class(config)
    missing, _ = model.load_state_dict(load_file(files[-1]), strict=False)
    _refuse_missing(model, list(missing))
    return model


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
