"""CLIP as a text encoder of Stable Diffusion or Flux: chunks of long captions, choice of layers.

Source: sd-scripts' library/strategy_sd.py, strategy_sdxl.py, strategy_sd3.py and strategy_flux.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from transformers import PreTrainedModel

from latentmake.caches import tokenizers
from latentmake.caches.encoders.text_model import Kind, load_text_model
from latentmake.caches.encoders.together import Results
from latentmake.caches.encoders.transfer import download, upload
from latentmake.caches.tokenizers import TokenCache
from latentmake.config.models import Model
from latentmake.config.rows import ClipOutput
from latentmake.errors import ModelError

CLIP_LENGTH = tokenizers.CHUNK + 2
"""Tokens of a chunk, with BOS and EOS."""


@dataclass(frozen=True)
class ClipTextEncoder:
    """A CLIP with its tokenizer. Any number of threads may encode.

    Attributes:
        model: the network.
        tokens: of captions.
        projection: of the hidden states, if any.
        kept: parts of its output.
        limit: tokens kept of a caption, without BOS and EOS; None: all.
        masked: whether padding is hidden from the network; with one chunk only.
        stored: dtype of embeddings.
    """

    model: PreTrainedModel
    tokens: TokenCache
    projection: torch.nn.Module | None
    kept: ClipOutput
    limit: int | None
    masked: bool = False
    stored: torch.dtype = torch.float32

    def queue(self, captions: Sequence[str], chunks: Sequence[int]) -> Results:
        """Begin to encode captions of so many chunks of 75 tokens each, all chunks as one batch.

        Returns:
            What waits for the device. Of each caption of n chunks `hidden_state` [75n + 2, D]: BOS
            of the first chunk, tokens of all, end of the last; `pooled` [D'] of the first chunk;
            `attention_mask` [75n + 2], 1 for BOS, tokens and EOS, 0 for padding, int64.
        """
        rows = [
            tokenizers.chunked(caption, self.tokens, number)
            for caption, number in zip(captions, chunks, strict=True)
        ]
        return self._queue(rows)

    @torch.inference_mode()
    def _queue(self, rows: Sequence[tokenizers.Row]) -> Results:
        device, chunks = self.model.device, [len(row.chunks) for row in rows]
        ids = upload(torch.tensor([chunk for row in rows for chunk in row.chunks]), device)
        masks = [torch.tensor(row.mask) for row in rows]
        network: Any = getattr(self.model, "text_model", self.model)  # without a projection
        output = network(
            input_ids=ids,
            attention_mask=upload(torch.stack(masks), device) if self.masked else None,
            output_hidden_states=self.kept.layer is not None,
        )
        firsts = list(accumulate(chunks[:-1], initial=0))  # each caption's first chunk
        made = [self._hidden(network, output)]
        if self.kept.pooled is not None:
            made.append(self._pooled(output, ids, upload(torch.tensor(firsts), device)))
        copied = download([each.to(self.stored) for each in made])

        def wait() -> list[dict[str, torch.Tensor]]:
            hidden, *pooled = copied()
            found = []
            for index, (first, number, mask) in enumerate(zip(firsts, chunks, masks, strict=True)):
                states = _joined(hidden[first : first + number])
                tensors = {"hidden_state": states, "attention_mask": mask}
                if pooled:
                    tensors["pooled"] = pooled[0][index]
                found.append(tensors)
            return found

        return wait

    def _hidden(self, network: Any, output: Any) -> torch.Tensor:
        """Return the hidden states that are kept, [chunks, 77, D]."""
        hidden: torch.Tensor = output.last_hidden_state
        if self.kept.layer is not None:
            hidden = output.hidden_states[-self.kept.layer]
            if self.kept.normalised:
                hidden = network.final_layer_norm(hidden)
        return hidden if self.projection is None else self.projection(hidden)

    def _pooled(self, output: Any, ids: torch.Tensor, firsts: torch.Tensor) -> torch.Tensor:
        """Return the vectors of the first chunks, [captions, D']."""
        vectors: torch.Tensor = output.pooler_output[firsts]
        if self.kept.pooled == "end":
            # Not the network's own: by its configuration it may take the highest id for EOS.
            ends = (ids[firsts] == self.tokens.tokenizer.eos_token_id).int().argmax(dim=1)
            vectors = output.last_hidden_state[firsts, ends]
        projection = getattr(self.model, "text_projection", None)
        if projection is not None and self.kept.pooled != "bare":
            vectors = projection(vectors)
        return vectors


def _joined(hidden: torch.Tensor) -> torch.Tensor:
    """Join a caption's chunks: [n, 77, D] -> [75n + 2, D]."""
    if len(hidden) == 1:
        return hidden[0]
    return torch.cat([hidden[0, :1], hidden[:, 1:-1].flatten(0, 1), hidden[-1, -1:]])


def load_clip_text(
    model: Model,
    index: int,
    device: torch.device,
    dtype: torch.dtype,
    stored: torch.dtype = torch.float32,
) -> ClipTextEncoder:
    """Load the text encoder at `index`, one of an architecture's CLIPs.

    Raises:
        ModelError: something is missing, incomplete or of another kind.
    """
    place, kept = model.text[index], model.spec.clips[index]
    if model.spec.picks_layer:
        kept = kept._replace(layer=model.clip_skip)
    kind: Kind = "CLIP with its projection" if kept.projects else "CLIP"
    loaded = load_text_model(place, device, dtype, kind)
    config = getattr(loaded.network.config, "text_config", loaded.network.config)
    hint = f"name {model.architecture}'s own {model.spec.text_encoders[index]}"
    fault = None
    if config.max_position_embeddings < CLIP_LENGTH:
        fault = f"has room for {config.max_position_embeddings} tokens and not for {CLIP_LENGTH}"
    elif (kept.layer or 1) > config.num_hidden_layers:
        fault = (
            f"has {config.num_hidden_layers} layers, but layer {kept.layer} from the last is kept"
        )
        hint = "lower `clip_skip`" if model.clip_skip else hint
    if fault is not None:
        raise ModelError(fault, where=place.path or place.hub or "", hint=hint)
    length = model.max_token_length
    return ClipTextEncoder(
        loaded.network,
        TokenCache(loaded.tokenizer),
        loaded.projection,
        kept=kept,
        limit=None if length == "auto" else length,
        masked=model.apply_lg_attn_mask,
        stored=stored,
    )
