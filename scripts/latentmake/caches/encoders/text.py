"""Text encoders of one model, with tensors under the names of a diffusers pipeline."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from latentmake.caches import tokenizers
from latentmake.caches.encoders.clip_text import CLIP_LENGTH, ClipTextEncoder, load_clip_text
from latentmake.caches.encoders.text_model import load_text_model
from latentmake.caches.encoders.together import Results, hiding, padded
from latentmake.caches.encoders.transfer import download, upload
from latentmake.caches.tokenizers import TokenCache
from latentmake.config.models import Model
from latentmake.config.weights import TextWeights
from latentmake.layouts.layout import layout_of
from latentmake.layouts.plain import encoder_name
from latentmake.models.files import T5_LENGTH


class TextEncoders:
    """A model's text encoders, as its architecture uses them.

    Args:
        model: whose encoders they are.
        device: that they compute on.
        dtype: that they compute in.
        stored: dtype of what they return.

    Raises:
        ModelError: something is missing, incomplete or of another kind.
    """

    def __init__(
        self,
        model: Model,
        device: torch.device,
        dtype: torch.dtype,
        stored: torch.dtype = torch.float32,
    ) -> None:
        self._max_token_length = model.max_token_length
        self._encoders = {
            encoder_name(index): _load(model, index, device, dtype, stored)
            for index in range(len(model.text))
        }
        self._clips = [
            each.tokens for each in self._encoders.values() if isinstance(each, ClipTextEncoder)
        ]

    def encode(self, captions: Sequence[str]) -> list[dict[str, torch.Tensor]]:
        """Encode captions.

        Returns:
            Of each caption, on the CPU: `text_encoder.hidden_state` [T, D] and, if the encoder has
            them, `text_encoder.pooled` [D] and `text_encoder.attention_mask` [T], int64;
            `text_encoder_2...` and so on.
        """
        return self.queue(captions)()

    def queue(self, captions: Sequence[str]) -> Results:
        """Begin to encode captions; what is returned waits for the device."""
        chunks = [self._chunks(caption) for caption in captions]
        begun = {
            name: each.queue(captions, chunks)
            if isinstance(each, ClipTextEncoder)
            else each.queue(captions)
            for name, each in self._encoders.items()
        }

        def wait() -> list[dict[str, torch.Tensor]]:
            found: list[dict[str, torch.Tensor]] = [{} for _ in captions]
            for name, results in begun.items():
                for tensors, own in zip(found, results(), strict=True):
                    tensors |= {f"{name}.{key}": value for key, value in own.items()}
            return found

        return wait

    def _chunks(self, caption: str) -> int:
        if not self._clips:
            return 0
        return tokenizers.chunks_needed(caption, self._clips, self._max_token_length)

    def lengths(self, caption: str) -> tuple[int, ...]:
        """Return how many tokens of a caption each encoder gets, with its padding."""
        chunks = self._chunks(caption)
        return tuple(
            chunks * CLIP_LENGTH if isinstance(each, ClipTextEncoder) else each.length(caption)
            for each in self._encoders.values()
        )

    def cutting(self, caption: str) -> Iterator[tuple[str, int]]:
        """Yield each encoder that cuts a caption, and the number of tokens it keeps."""
        for name, each in self._encoders.items():
            if each.limit is not None and each.tokens.count(caption) > each.limit:
                yield name, each.limit


@dataclass(frozen=True)
class TextEncoder:
    """Any CLIP, T5 or UMT5 encoder: its last hidden states. Any number of threads may encode.

    Attributes:
        model: the network.
        tokens: of captions.
        projection: of the hidden states, if any.
        padded: whether captions are padded to `max_length` tokens (CLIP, whose padding the UNet
            attends to) or keep their own length (T5).
        max_length: tokens kept of a caption, with BOS and EOS.
        masked: whether padding is hidden from the network. CLIP was trained without a mask, and
            Stable Diffusion uses none either.
        tells_mask: whether embeddings come with their `attention_mask`.
        stored: dtype of embeddings.
    """

    model: PreTrainedModel
    tokens: TokenCache
    projection: torch.nn.Module | None
    padded: bool
    max_length: int
    masked: bool = True
    tells_mask: bool = False
    stored: torch.dtype = torch.float32

    @property
    def limit(self) -> int:
        """Tokens kept of a caption, without BOS and EOS."""
        return self.max_length - int(self.tokens.tokenizer.num_special_tokens_to_add())

    def length(self, caption: str) -> int:
        """Return how many tokens of a caption the network gets at least, with padding."""
        return self.max_length if self.padded else len(self._ids(caption))

    def _ids(self, caption: str) -> list[int]:
        # Empty captions without EOS get one token of padding, which is not hidden.
        return self.tokens.ids(caption, self.max_length) or [self._padding]

    @property
    def _padding(self) -> int:
        return int(self.tokens.tokenizer.pad_token_id or 0)

    def encode(self, captions: Sequence[str]) -> list[dict[str, torch.Tensor]]:
        """Encode captions.

        Returns:
            Of each caption `hidden_state` [T, D]; for CLIP `pooled` [D], the network's vector of
            the last token; on the CPU. With `tells_mask`, `attention_mask` [T], 1 for tokens and 0
            for padding, int64.
        """
        return self.queue(captions)()

    def queue(self, captions: Sequence[str]) -> Results:
        """Begin to encode captions; what is returned waits for the device."""
        rows = [self._ids(caption) for caption in captions]
        return self._queue(rows, [self.max_length if self.padded else len(row) for row in rows])

    @torch.inference_mode()
    def _queue(self, rows: Sequence[Sequence[int]], lengths: Sequence[int]) -> Results:
        """Begin to encode the tokens of captions, padded to one length; so many states are kept."""
        ids, mask = padded(rows, max(lengths), self._padding)
        output = self.model(
            input_ids=upload(ids, self.model.device),
            attention_mask=hiding(mask, self.model) if self.masked else None,
        )
        hidden = output.last_hidden_state
        if self.projection is not None:
            hidden = self.projection(hidden)
        pooled = output.text_embeds if "text_embeds" in output else output.get("pooler_output")
        made = [hidden] if pooled is None else [hidden, pooled]
        copied = download([each.to(self.stored) for each in made])

        def wait() -> list[dict[str, torch.Tensor]]:
            states, *vectors = copied()
            found = []
            for index, length in enumerate(lengths):
                tensors = {"hidden_state": states[index, :length]}
                if vectors:
                    tensors["pooled"] = vectors[0][index]
                if self.tells_mask:
                    tensors["attention_mask"] = mask[index, :length]
                found.append(tensors)
            return found

        return wait


def _load(
    model: Model, index: int, device: torch.device, dtype: torch.dtype, stored: torch.dtype
) -> TextEncoder | ClipTextEncoder:
    place = model.text[index]
    if model.architecture is None:
        return load_text_encoder(place, device, dtype, stored)
    if model.spec.text_encoders[index] != "T5":
        return load_clip_text(model, index, device, dtype, stored)
    # sd-scripts pads T5's captions and shows it the padding, unless told otherwise.
    pads = layout_of(model.layout_name).pads_t5
    loaded = load_text_model(place, device, dtype, "T5")
    return TextEncoder(
        loaded.network,
        TokenCache(loaded.tokenizer),
        loaded.projection,
        padded=pads,
        max_length=place.max_length or T5_LENGTH,
        masked=model.apply_t5_attn_mask or not pads,
        tells_mask=True,
        stored=stored,
    )


def load_text_encoder(
    weights: TextWeights,
    device: torch.device,
    dtype: torch.dtype,
    stored: torch.dtype = torch.float32,
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
    return TextEncoder(
        loaded.network,
        TokenCache(loaded.tokenizer),
        loaded.projection,
        padded=clip,
        max_length=limit,
        masked=not clip,
        stored=stored,
    )
