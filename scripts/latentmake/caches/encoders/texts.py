"""All text encoders of one model, with their tensors under the names of a diffusers pipeline."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from latentmake import layouts
from latentmake.caches.encoders.clip_text import ClipTextEncoder, load_clip_text
from latentmake.caches.encoders.text import TextEncoder, load_t5, load_text_encoder
from latentmake.config import Model
from latentmake.layouts.plain import encoder_name
from latentmake.models import tokenizers as tokens

__all__ = ["TextEncoders"]


class TextEncoders:
    """A model's text encoders, as its architecture uses them; without one, as they are.

    Args:
        model: names them.
        device: where they shall run.
        dtype: in what they shall compute.

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
            For each what every encoder gives, on the CPU: `text_encoder.hidden_state` [T, D] and,
            where it has them, `text_encoder.pooled` [D] and `text_encoder.attention_mask` [T],
            int64; `text_encoder_2...` and so on.
        """
        clips = [each for each in self._encoders.values() if isinstance(each, ClipTextEncoder)]
        tokenizers = [each.tokenizer for each in clips]
        length = self._max_token_length
        chunks = [tokens.chunks_needed(each, tokenizers, length) for each in captions if clips]
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
        """Yield each encoder that cuts a caption, and how many tokens it keeps."""
        for name, each in self._encoders.items():
            if each.limit is not None and tokens.count(caption, each.tokenizer) > each.limit:
                yield name, each.limit


def _load(
    model: Model, index: int, device: torch.device, dtype: torch.dtype
) -> TextEncoder | ClipTextEncoder:
    place = model.text[index]
    if model.architecture is None:
        return load_text_encoder(place, device, dtype)
    if model.spec.text_encoders[index] != "T5":
        return load_clip_text(model, index, device, dtype)
    # sd-scripts fills T5's captions up and lets it see the padding, unless it is told otherwise.
    padded = layouts.of(model.layout_name).pads_t5
    masked = model.apply_t5_attn_mask or not padded
    return load_t5(place, device, dtype, padded=padded, masked=masked)
