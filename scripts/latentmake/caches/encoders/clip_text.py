"""CLIP as a text encoder of Stable Diffusion or Flux: chunks of long captions, choice of layers.

Source: sd-scripts' library/strategy_sd.py, strategy_sdxl.py, strategy_sd3.py and strategy_flux.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from latentmake.caches.encoders.text_model import Kind, load_text_model
from latentmake.config import Model
from latentmake.config.architectures import ClipOutput
from latentmake.errors import ModelError
from latentmake.models import tokenizers

__all__ = ["ClipTextEncoder", "load_clip_text"]

_LENGTH = tokenizers.CHUNK + 2


@dataclass(frozen=True)
class ClipTextEncoder:
    """A CLIP with its tokenizer.

    Attributes:
        model: the network.
        tokenizer: of the network.
        projection: of the hidden states, if any.
        kept: parts of its output.
        limit: tokens kept of a caption, without BOS and EOS; None: all.
        masked: whether padding is hidden from the network; with one chunk only.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    projection: torch.nn.Module | None
    kept: ClipOutput
    limit: int | None
    masked: bool = False

    @torch.inference_mode()
    def encode(
        self, captions: Sequence[str], chunks: Sequence[int]
    ) -> list[dict[str, torch.Tensor]]:
        """Encode captions of so many chunks of 75 tokens each, all chunks as one batch.

        Returns:
            Of each caption of n chunks `hidden_state` [75n + 2, D]: BOS of the first chunk, tokens
            of all, end of the last; `pooled` [D'] of the first chunk; `attention_mask` [75n + 2], 1
            for BOS, tokens and EOS, 0 for padding. float32 and int64, on the CPU.
        """
        rows = [
            tokenizers.chunked(caption, self.tokenizer, number)
            for caption, number in zip(captions, chunks, strict=True)
        ]
        device = self.model.device
        ids = torch.tensor([chunk for row in rows for chunk in row.chunks], device=device)
        masks = [torch.tensor(row.mask) for row in rows]
        network: Any = getattr(self.model, "text_model", self.model)  # without a projection
        output = network(
            input_ids=ids,
            attention_mask=torch.stack(masks).to(device) if self.masked else None,
            output_hidden_states=self.kept.layer is not None,
        )
        firsts = list(accumulate(chunks[:-1], initial=0))  # each caption's first chunk
        hidden = self._hidden(network, output)
        found = [
            {"hidden_state": _joined(hidden[first : first + number]), "attention_mask": mask}
            for first, number, mask in zip(firsts, chunks, masks, strict=True)
        ]
        if self.kept.pooled is not None:
            pooled = self._pooled(output, ids, torch.tensor(firsts, device=device)).float().cpu()
            for tensors, vector in zip(found, pooled, strict=True):
                tensors["pooled"] = vector.clone()
        return found

    def _hidden(self, network: Any, output: Any) -> torch.Tensor:
        """Return the hidden states that are kept, [chunks, 77, D]."""
        hidden: torch.Tensor = output.last_hidden_state
        if self.kept.layer is not None:
            hidden = output.hidden_states[-self.kept.layer]
            if self.kept.normalised:
                hidden = network.final_layer_norm(hidden)
        if self.projection is not None:
            hidden = self.projection(hidden)
        return hidden.float().cpu()

    def _pooled(self, output: Any, ids: torch.Tensor, firsts: torch.Tensor) -> torch.Tensor:
        """Return the vectors of the first chunks, [captions, D']."""
        vectors: torch.Tensor = output.pooler_output[firsts]
        if self.kept.pooled == "end":
            # Not the network's own: by its configuration it may take the highest id for EOS.
            ends = (ids[firsts] == self.tokenizer.eos_token_id).int().argmax(dim=1)
            vectors = output.last_hidden_state[firsts, ends]
        projection = getattr(self.model, "text_projection", None)
        if projection is not None and self.kept.pooled != "bare":
            vectors = projection(vectors)
        return vectors


def _joined(hidden: torch.Tensor) -> torch.Tensor:
    """Join a caption's chunks: [n, 77, D] -> [75n + 2, D]."""
    return torch.cat([hidden[0, :1], hidden[:, 1:-1].flatten(0, 1), hidden[-1, -1:]])


def load_clip_text(
    model: Model, index: int, device: torch.device, dtype: torch.dtype
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
    if config.max_position_embeddings < _LENGTH:
        fault = f"has room for {config.max_position_embeddings} tokens and not for {_LENGTH}"
    elif (kept.layer or 1) > config.num_hidden_layers:
        fault = (
            f"has {config.num_hidden_layers} layers, but layer {kept.layer} from the last is kept"
        )
        hint = "lower `clip_skip`" if model.clip_skip else hint
    if fault is not None:
        raise ModelError(fault, where=place.path or place.hub or "", hint=hint)
    length = model.max_token_length
    return ClipTextEncoder(
        *loaded,
        kept=kept,
        limit=None if length == "auto" else length,
        masked=model.apply_lg_attn_mask,
    )
