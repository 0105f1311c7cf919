"""Text encoders of one model, with tensors under the names of a diffusers pipeline."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from latentmake import layouts
from latentmake.caches.encoders.clip_text import ClipTextEncoder, load_clip_text
from latentmake.caches.encoders.text_model import load_text_model
from latentmake.config import Model, TextWeights
from latentmake.layouts.plain import encoder_name
from latentmake.models import tokenizers
from latentmake.models.shapes import T5_LENGTH

__all__ = ["TextEncoder", "TextEncoders", "load_text_encoder"]


class TextEncoders:
    """A model's text encoders, as its architecture uses them.

    Raises:
        ModelError: something is missing, incomplete or of another kind.
    """

    def __init__(self, model: Model, device: torch.device, dtype: torch.dtype) -> None:
        self._max_token_length = model.max_token_length
        self._encoders = {
            encoder_name(index): _load(model, index, device, dtype)
            for index in range(len(model.text))
        }

    def encode(self, captions: Sequence[str]) -> list[dict[str, torch.Tensor]]:
        """Encode captions.

        Returns:
            Of each caption, on the CPU: `text_encoder.hidden_state` [T, D] and, if the encoder has
            them, `text_encoder.pooled` [D] and `text_encoder.attention_mask` [T], int64;
            `text_encoder_2...` and so on.
        """
        clips = [each for each in self._encoders.values() if isinstance(each, ClipTextEncoder)]
        chunks = [
            tokenizers.chunks_needed(
                caption, [each.tokenizer for each in clips], self._max_token_length
            )
            for caption in captions
            if clips
        ]
        found: list[dict[str, torch.Tensor]] = [{} for _ in captions]
        for name, each in self._encoders.items():
            if isinstance(each, ClipTextEncoder):
                made = each.encode(captions, chunks)
            else:
                made = each.encode(captions)
            for tensors, own in zip(found, made, strict=True):
                tensors |= {f"{name}.{key}": value for key, value in own.items()}
        return found

    def cutting(self, caption: str) -> Iterator[tuple[str, int]]:
        """Yield each encoder that cuts a caption, and the number of tokens it keeps."""
        for name, each in self._encoders.items():
            if each.limit is not None and tokenizers.count(caption, each.tokenizer) > each.limit:
                yield name, each.limit


@dataclass(frozen=True)
class TextEncoder:
    """Any CLIP, T5 or UMT5 encoder: its last hidden states.

    Attributes:
        model: the network.
        tokenizer: of the network.
        projection: of the hidden states, if any.
        padded: whether captions are padded to `max_length` tokens (CLIP, whose padding the UNet
            attends to) or keep their own length (T5).
        max_length: tokens kept of a caption, with BOS and EOS.
        masked: whether padding is hidden from the network. CLIP was trained without a mask, and
            Stable Diffusion uses none either.
        tells_mask: whether embeddings come with their `attention_mask`.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    projection: torch.nn.Module | None
    padded: bool
    max_length: int
    masked: bool = True
    tells_mask: bool = False

    @property
    def limit(self) -> int:
        """Tokens kept of a caption, without BOS and EOS."""
        return self.max_length - int(self.tokenizer.num_special_tokens_to_add())

    @torch.inference_mode()
    def encode(self, captions: Sequence[str]) -> list[dict[str, torch.Tensor]]:
        """Encode captions.

        Returns:
            Of each caption `hidden_state` [T, D]; for CLIP `pooled` [D], the network's vector of
            the last token; float32, on the CPU. With `tells_mask`, `attention_mask` [T], 1 for
            tokens and 0 for padding, int64.
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
        mask = tokens.attention_mask if self.masked else None
        output = self.model(input_ids=tokens.input_ids, attention_mask=mask)
        hidden = output.last_hidden_state
        if self.projection is not None:
            hidden = self.projection(hidden)
        hidden, masks = hidden.float().cpu(), tokens.attention_mask.cpu()
        lengths = [hidden.shape[1]] * len(hidden) if self.padded else masks.sum(dim=1).tolist()
        pooled = output.text_embeds if "text_embeds" in output else output.get("pooler_output")
        found = []
        for index, length in enumerate(lengths):
            tensors = {"hidden_state": hidden[index, :length].clone()}
            if pooled is not None:
                tensors["pooled"] = pooled[index].float().cpu().clone()
            if self.tells_mask:
                tensors["attention_mask"] = masks[index, :length].clone()
            found.append(tensors)
        return found


def _give_one_token(tokens: Any, padding: int) -> None:
    """Give captions without any token, such as empty ones, one token of padding."""
    if tokens.input_ids.shape[1] == 0:
        shape = (len(tokens.input_ids), 1)
        tokens["input_ids"] = torch.full(shape, padding, device=tokens.input_ids.device).long()
        tokens["attention_mask"] = torch.ones_like(tokens["input_ids"])
    tokens["attention_mask"][:, 0] = 1


def _load(
    model: Model, index: int, device: torch.device, dtype: torch.dtype
) -> TextEncoder | ClipTextEncoder:
    place = model.text[index]
    if model.architecture is None:
        return load_text_encoder(place, device, dtype)
    if model.spec.text_encoders[index] != "T5":
        return load_clip_text(model, index, device, dtype)
    # sd-scripts pads T5's captions and shows it the padding, unless told otherwise.
    padded = layouts.of(model.layout_name).pads_t5
    return TextEncoder(
        *load_text_model(place, device, dtype, "T5"),
        padded=padded,
        max_length=place.max_length or T5_LENGTH,
        masked=model.apply_t5_attn_mask or not padded,
        tells_mask=True,
    )


def load_text_encoder(
    weights: TextWeights, device: torch.device, dtype: torch.dtype
) -> TextEncoder:
    """Load a text encoder of any kind and its tokenizer for inference.

    Raises:
        ModelError: something is missing, incomplete or of another kind.
    """
    loaded = load_text_model(weights, device, dtype)
    config = loaded.network.config
    clip = str(config.model_type).startswith("clip")
    limit = weights.max_length or T5_LENGTH
    if clip:
        positions = int(getattr(config, "text_config", config).max_position_embeddings)
        limit = min(weights.max_length or positions, positions)
    return TextEncoder(*loaded, padded=clip, max_length=limit, masked=not clip)
