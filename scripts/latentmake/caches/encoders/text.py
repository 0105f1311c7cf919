"""Text encoders of a model: captions to hidden states.

Captions that are encoded together are padded:

- CLIP of an architecture: to chunks of 77 tokens each, without a mask as a rule, for a UNet attends
  to the padding, too.
- T5 and umT5 with a mask: to the longest of a batch. Padding is hidden from the tokens and is no
  part of the cache (musubi-tuner cuts it off: `T5EncoderModel.__call__` of wan/modules/t5.py).
- T5 of sd-scripts' layout: to 512 tokens, with or without a mask. The cache holds the padding.

Hidden padding adds zeros to sums. That changes their order, and with it the last bits.

Source: sd-scripts' library/strategy_sd.py, strategy_sdxl.py, strategy_sd3.py and strategy_flux.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, Literal

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from latentmake.caches.encoders import Encoded, Loaded, Named, results
from latentmake.caches.encoders.device import download, upload
from latentmake.caches.encoders.text_model import Kind, load_text_model
from latentmake.caches.inputs import Sample
from latentmake.caches.tokenizers import CHUNK, Row, TokenCache, chunked, chunks_needed
from latentmake.config.models import Model
from latentmake.config.rows import ClipOutput
from latentmake.config.weights import TextWeights
from latentmake.errors import ModelError
from latentmake.layouts.layout import layout_of
from latentmake.layouts.plain import encoder_name
from latentmake.models.files import T5_LENGTH

Tensors = dict[str, torch.Tensor]
Results = Callable[[], list[Tensors]]
"""Waits for the device; tensors by name, of each caption, on the CPU."""

_NAMED = 3  # captions that a line about many of them names


@dataclass(frozen=True)
class TextEncoder:
    """A CLIP, T5 or umT5 with its tokenizer. Any number of threads may encode.

    Attributes:
        network: of transformers.
        tokens: of captions.
        projection: of the hidden states, if any.
        max_length: tokens kept of a caption, with BOS and EOS; None: all.
        padding: of captions: to `chunks` of 77 tokens, to `max_length` of them, or only to the
            longest of a batch (None), which is no part of the results.
        kept: tensors kept of a CLIP's output; None: of a T5, the last hidden states.
        masked: whether padding is hidden from the network; with one chunk only. CLIP was trained
            without a mask, and Stable Diffusion uses none either.
        tells_mask: whether embeddings come with their `attention_mask`.
        stored: dtype of embeddings.
    """

    network: PreTrainedModel
    tokens: TokenCache
    projection: torch.nn.Module | None
    max_length: int | None
    padding: Literal["chunks", "max_length"] | None = None
    kept: ClipOutput | None = None
    masked: bool = True
    tells_mask: bool = False
    stored: torch.dtype = torch.float32

    @property
    def limit(self) -> int | None:
        """Tokens kept of a caption, without BOS and EOS."""
        return None if self.max_length is None else self.max_length - self.tokens.special

    def row(self, caption: str, chunks: int = 1) -> Row:
        """Return a caption's tokens as the network gets them, with padding that is kept."""
        if self.padding == "chunks":
            return chunked(caption, self.tokens, chunks)
        # Empty captions without EOS get one token of padding, which is not hidden.
        ids = self.tokens.ids(caption, self.max_length) or [self.tokens.padding]
        rest = (self.max_length or 0) - len(ids) if self.padding else 0
        ids, mask = ids + [self.tokens.padding] * rest, [1] * len(ids) + [0] * rest
        return Row(ids, mask, [ids])

    def encode(self, captions: Sequence[str]) -> list[Tensors]:
        """Encode captions, those of a CLIP in one chunk each; see `queue`."""
        return self.queue([self.row(caption) for caption in captions])()

    @torch.inference_mode()
    def queue(self, rows: Sequence[Row]) -> Results:
        """Begin to encode the tokens of captions, all chunks as one batch.

        Returns:
            What waits for the device. Of each caption `hidden_state` [T, D]: of n chunks [75n + 2,
            D], BOS of the first, tokens of all, end of the last; for CLIP `pooled` [D'] of the
            first chunk, if it is kept; with `tells_mask`, `attention_mask` [T], 1 for tokens and 0
            for padding, int64.
        """
        device, parts = self.network.device, [len(row.chunks) for row in rows]
        chunks = [torch.tensor(chunk) for row in rows for chunk in row.chunks]
        ids = upload(
            pad_sequence(chunks, batch_first=True, padding_value=self.tokens.padding), device
        )
        masks = [torch.tensor(row.mask) for row in rows]
        network: Any = self.network
        if self.kept is not None:
            network = getattr(network, "text_model", network)  # without a projection
        output = network(
            input_ids=ids,
            attention_mask=self._mask(masks),
            output_hidden_states=self.kept is not None and self.kept.layer is not None,
        )
        firsts = list(accumulate(parts[:-1], initial=0))  # each caption's first chunk
        made = self._made(network, output, ids, firsts)
        copied = download([each.to(self.stored) for each in made])

        def wait() -> list[Tensors]:
            hidden, *pooled = copied()
            found: list[Tensors] = []
            for index, states in enumerate(hidden.split_with_sizes(parts)):
                found.append({"hidden_state": _joined(states)[: len(masks[index])]})
                if pooled:
                    found[-1]["pooled"] = pooled[0][index]
                if self.tells_mask:
                    found[-1]["attention_mask"] = masks[index]
            return found

        return wait

    def _mask(self, masks: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """Return the network's argument `attention_mask` for the masks of captions."""
        if not self.masked:
            return None
        mask = pad_sequence([*masks], batch_first=True)
        return upload(mask, self.network.device) if self.kept else hiding(mask, self.network)

    def _made(
        self, network: Any, output: Any, ids: torch.Tensor, firsts: Sequence[int]
    ) -> Iterator[torch.Tensor]:
        """Yield the hidden states of all chunks, [chunks, T, D], then any vectors, [captions, D'].

        A caption's vector is that of its first chunk.
        """
        hidden: torch.Tensor = output.last_hidden_state
        kept, project = self.kept, self.projection or torch.nn.Identity()
        if kept is None or kept.layer is None:
            yield project(hidden)
        else:
            states = output.hidden_states[-kept.layer]
            yield project(network.final_layer_norm(states) if kept.normalised else states)
        if kept is None or kept.pooled is None:
            return
        places = upload(torch.tensor(firsts), ids.device)
        vectors: torch.Tensor = output.pooler_output[places]
        if kept.pooled == "end":
            # Not the network's own: by its configuration it may take the highest id for EOS.
            ends = (ids[places] == self.tokens.tokenizer.eos_token_id).int().argmax(dim=1)
            vectors = hidden[places, ends]
        projection = getattr(self.network, "text_projection", None)
        yield vectors if projection is None or kept.pooled == "bare" else projection(vectors)


def _joined(hidden: torch.Tensor) -> torch.Tensor:
    """Join a caption's chunks: [n, 77, D] -> [75n + 2, D]."""
    if len(hidden) == 1:
        return hidden[0]
    return torch.cat([hidden[0, :1], hidden[:, 1:-1].flatten(0, 1), hidden[-1, -1:]])


def hiding(mask: torch.Tensor, network: PreTrainedModel) -> torch.Tensor | None:
    """Return the argument `attention_mask` of a T5 or umT5 on its device; `mask` is [N, T], int64.

    None where nothing is padded. transformers would look at a mask [N, T] on the device for that,
    and wait until the work before it is done (`_ignore_bidirectional_mask_sdpa` of masking_utils).
    A mask of four dimensions it takes as it is.
    """
    if bool(mask.all()):
        return None
    if network.config._attn_implementation != "sdpa":
        return upload(mask, network.device)
    return upload(mask.bool()[:, None, None], network.device)


class TextEncoders:
    """A model's text encoders.

    Args:
        encoders: by their names in cache files and messages.
        max_token_length: of CLIPs that take captions in chunks.
    """

    def __init__(
        self,
        encoders: dict[str, TextEncoder],
        max_token_length: int | Literal["auto"] = CHUNK,
    ) -> None:
        self._encoders = encoders
        clips = [each.tokens for each in encoders.values() if each.padding == "chunks"]
        self._chunks = partial(chunks_needed, tokens=clips, max_token_length=max_token_length)
        self._cut: dict[tuple[str, int], dict[str, str]] = {}

    def encode(self, captions: Sequence[str]) -> list[Tensors]:
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
            name: each.queue([each.row(*one) for one in zip(captions, chunks, strict=True)])
            for name, each in self._encoders.items()
        }

        def wait() -> list[Tensors]:
            found: list[Tensors] = [{} for _ in captions]
            for name, wait_for in begun.items():
                for tensors, own in zip(found, wait_for(), strict=True):
                    tensors |= {f"{name}.{key}": value for key, value in own.items()}
            return found

        return wait

    def lengths(self, caption: str) -> tuple[int, ...]:
        """Return how many tokens of a caption each encoder gets, with its padding."""
        chunks = self._chunks(caption)
        rows = [each.row(caption, chunks) for each in self._encoders.values()]
        return tuple(sum(map(len, row.chunks)) for row in rows)

    def cutting(self, caption: str) -> Iterator[tuple[str, int]]:
        """Yield each encoder that cuts a caption, and the number of tokens it keeps."""
        for name, each in self._encoders.items():
            if each.limit is not None and each.tokens.count(caption) > each.limit:
                yield name, each.limit

    def loaded(self, named: Callable[[str, Tensors], Named]) -> Loaded:
        """Return these encoders for a job; `named` names a caption's results in its file."""

        def encode(samples: list[Sample]) -> Encoded:
            captions = [str(sample.content) for sample in samples]
            begun = self.queue(captions)
            for sample, caption in zip(samples, captions, strict=True):
                for cut in self.cutting(caption):
                    self._cut.setdefault(cut, {})[sample.key] = sample.item.name
            return results(captions, lambda: [begun()], named)

        return Loaded(encode, remarks=self._remarks, lengths=self.lengths)

    def _remarks(self) -> list[str]:
        """Return a line for each encoder that cut any caption since this was asked last."""
        found = []
        cut, self._cut = self._cut, {}
        for (encoder, limit), names in cut.items():
            many = "1 caption is" if len(names) == 1 else f"{len(names)} captions are"
            first = ", ".join(sorted(names.values())[:_NAMED])
            more = " ..." if len(names) > _NAMED else ""
            found.append(f"{many} cut to the first {limit} tokens by {encoder}: {first}{more}")
        return found


# -- loading --------------------------------------------------------------------------------------


def text_encoders(
    model: Model, device: torch.device, dtype: torch.dtype, stored: torch.dtype = torch.float32
) -> TextEncoders:
    """Load a model's text encoders, as its architecture uses them; they return dtype `stored`.

    Raises:
        ModelError: something is missing, incomplete or of another kind.
    """
    found = (_load(model, index, device, dtype, stored) for index in range(len(model.text)))
    named = {encoder_name(index): each for index, each in enumerate(found)}
    return TextEncoders(named, model.max_token_length)


def _load(
    model: Model, index: int, device: torch.device, dtype: torch.dtype, stored: torch.dtype
) -> TextEncoder:
    place, spec = model.text[index], model.spec
    if model.architecture is None:
        return load_text_encoder(place, device, dtype, stored)
    if spec.text_encoders[index] == "T5":
        # sd-scripts pads T5's captions and shows it the padding, unless told otherwise.
        pads = layout_of(model.layout_name).pads_t5
        return TextEncoder(
            *load_text_model(place, device, dtype, "T5"),
            max_length=place.max_length or T5_LENGTH,
            padding="max_length" if pads else None,
            masked=model.apply_t5_attn_mask or not pads,
            tells_mask=True,
            stored=stored,
        )
    kept, length = spec.clips[index], model.max_token_length
    if spec.picks_layer:
        kept = kept._replace(layer=model.clip_skip)
    kind: Kind = "CLIP with its projection" if kept.projects else "CLIP"
    loaded = load_text_model(place, device, dtype, kind)
    config: Any = loaded.network.config
    layers = getattr(config, "text_config", config).num_hidden_layers
    if (kept.layer or 1) > layers:
        hint = "lower `clip_skip`" if model.clip_skip else f"name {model.architecture}'s own CLIP"
        fault = f"has {layers} layers, but layer {kept.layer} from the last is kept"
        raise ModelError(fault, where=place.path or place.hub or "", hint=hint)
    return TextEncoder(
        *loaded,
        max_length=None if length == "auto" else length + loaded.tokens.special,
        padding="chunks",
        kept=kept,
        masked=model.apply_lg_attn_mask,
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
    config: Any = loaded.network.config
    if not str(config.model_type).startswith("clip"):
        return TextEncoder(*loaded, max_length=weights.max_length or T5_LENGTH, stored=stored)
    positions = int(getattr(config, "text_config", config).max_position_embeddings)
    return TextEncoder(
        *loaded,
        max_length=min(weights.max_length or positions, positions),
        padding="max_length",
        kept=ClipOutput(layer=None, normalised=True, pooled="own"),
        masked=False,
        stored=stored,
    )
