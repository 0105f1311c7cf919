"""Last hidden states of any CLIP, T5 or UMT5 text encoder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from latentmake.caches.encoders.text_model import is_clip, load_text_model
from latentmake.config import TextWeights
from latentmake.models.shapes import T5_LENGTH

__all__ = ["TextEncoder", "load_t5", "load_text_encoder"]


@dataclass(frozen=True)
class TextEncoder:
    """A text encoder with its tokenizer.

    Attributes:
        model: the network.
        tokenizer: of the network.
        padded: whether captions are padded to `max_length` tokens (CLIP, whose padding the UNet
            attends to) or keep their own length (T5).
        max_length: tokens kept of a caption, with BOS and EOS.
        projection: of the hidden states, if any.
        masked: whether padding is hidden from the network. CLIP was trained without a mask, and
            Stable Diffusion uses none either.
        tells_mask: whether embeddings come with their `attention_mask`.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    padded: bool
    max_length: int
    projection: torch.nn.Module | None = None
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
            Of each caption `hidden_state` [T, D], projected if there is a projection; for CLIP
            `pooled` [D], the network's vector of the last token; float32, on the CPU. With
            `tells_mask`, `attention_mask` [T], 1 for tokens and 0 for padding, int64.
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
        found = [
            {"hidden_state": row[:length].clone()}
            for row, length in zip(hidden, lengths, strict=True)
        ]
        pooled = output.text_embeds if "text_embeds" in output else output.get("pooler_output")
        for index, (tensors, length) in enumerate(zip(found, lengths, strict=True)):
            if pooled is not None:
                tensors["pooled"] = pooled[index].float().cpu().clone()
            if self.tells_mask:
                tensors["attention_mask"] = masks[index, :length].clone()
        return found


def _give_one_token(tokens: Any, padding: int) -> None:
    """Give captions without any token, such as empty ones, one token of padding."""
    if tokens.input_ids.shape[1] == 0:
        shape = (len(tokens.input_ids), 1)
        tokens["input_ids"] = torch.full(shape, padding, device=tokens.input_ids.device).long()
        tokens["attention_mask"] = torch.ones_like(tokens["input_ids"])
    tokens["attention_mask"][:, 0] = 1


def load_text_encoder(
    weights: TextWeights, device: torch.device, dtype: torch.dtype
) -> TextEncoder:
    """Load a text encoder of any kind and its tokenizer for inference.

    Raises:
        ModelError: something is missing, incomplete or of another kind.
    """
    model, tokenizer, projection = load_text_model(weights, device, dtype)
    clip = is_clip(model)
    limit = weights.max_length or T5_LENGTH
    if clip:
        text_config = getattr(model.config, "text_config", model.config)
        positions = int(text_config.max_position_embeddings)
        limit = min(weights.max_length or positions, positions)
    return TextEncoder(model, tokenizer, clip, limit, projection, masked=not clip)


def load_t5(
    weights: TextWeights, device: torch.device, dtype: torch.dtype, *, padded: bool, masked: bool
) -> TextEncoder:
    """Load an architecture's T5.

    Args:
        weights: of T5 and its tokenizer.
        device: to run on.
        dtype: to compute in.
        padded: pad every caption to the full length.
        masked: hide that padding from the network.

    Raises:
        ModelError: something is missing, incomplete or of another kind.
    """
    model, tokenizer, projection = load_text_model(weights, device, dtype, "T5")
    length = weights.max_length or T5_LENGTH
    return TextEncoder(model, tokenizer, padded, length, projection, masked=masked, tells_mask=True)
