"""CLIP as the text encoder of a Stable Diffusion: long captions in chunks, and the layer it takes.

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

__all__ = ["ClipTextEncoder", "kept", "load_clip_text"]

_LENGTH = tokenizers.CHUNK + 2


def kept(model: Model, index: int) -> ClipOutput:
    """Return the output that a model's architecture keeps of its CLIP at `index`."""
    output = model.spec.clips[index]
    return output._replace(layer=model.clip_skip) if model.spec.picks_layer else output


@dataclass(frozen=True)
class ClipTextEncoder:
    """A CLIP with its tokenizer.

    Attributes:
        model: the network.
        tokenizer: what cuts a caption into tokens.
        kept: what of its output.
        limit: how many of a caption's own tokens are kept; None: all.
        masked: whether the padding is hidden from the network; with one chunk alone.
        projection: what the hidden states go through at last; None leaves them as they are.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    kept: ClipOutput
    limit: int | None
    masked: bool = False
    projection: torch.nn.Module | None = None

    @torch.inference_mode()
    def encode(
        self, captions: Sequence[str], chunks: Sequence[int]
    ) -> list[dict[str, torch.Tensor]]:
        """Encode captions, all their chunks as one batch.

        Args:
            captions: of any length.
            chunks: into how many chunks of 75 tokens each is cut.

        Returns:
            For each, of n chunks: `hidden_state` [75n + 2, D]: the state of the first chunk's BOS,
            of each chunk those between BOS and its last, and of the last chunk the last; `pooled`
            [D'], the first chunk's; `attention_mask` [75n + 2], 1 for BOS, tokens and EOS, 0 for
            padding. float32 and int64, on the CPU.
        """
        rows = [
            tokenizers.chunked(caption, self.tokenizer, number)
            for caption, number in zip(captions, chunks, strict=True)
        ]
        device = self.model.device
        ids = torch.tensor([chunk for row in rows for chunk in row.chunks], device=device)
        masks = [torch.tensor(row.mask) for row in rows]
        network = _network(self.model)
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
        if projection is None or self.kept.pooled == "bare":
            return vectors
        projected: torch.Tensor = projection(vectors)
        return projected


def _network(model: PreTrainedModel) -> Any:
    """Return the part of a CLIP that comes before the projection, if it has one."""
    return getattr(model, "text_model", model)


def _joined(hidden: torch.Tensor) -> torch.Tensor:
    """Put a caption's chunks together again: [n, 77, D] -> [75n + 2, D]."""
    return torch.cat([hidden[0, :1], hidden[:, 1:-1].flatten(0, 1), hidden[-1, -1:]])


def load_clip_text(
    model: Model, index: int, device: torch.device, dtype: torch.dtype
) -> ClipTextEncoder:
    """Load one of an architecture's CLIPs.

    Args:
        model: names it.
        index: which of its text encoders.
        device: where it shall run.
        dtype: in what it shall compute.

    Raises:
        ModelError: something is missing, incomplete or of another kind.
    """
    place, taken = model.text[index], kept(model, index)
    kind: Kind = "CLIP with its projection" if taken.projects else "CLIP"
    network, tokenizer, projection = load_text_model(place, device, dtype, kind)
    config = getattr(network.config, "text_config", network.config)
    where = place.path or place.hub or ""
    own = f"name {model.architecture}'s own {model.spec.text_encoders[index]}"
    if config.max_position_embeddings < _LENGTH:
        raise ModelError(
            f"has room for {config.max_position_embeddings} tokens and not for {_LENGTH}",
            where=where,
            mend=own,
        )
    if (taken.layer or 1) > config.num_hidden_layers:
        raise ModelError(
            f"has {config.num_hidden_layers} layers, and layer {taken.layer} from the last is kept",
            where=where,
            mend="lower `clip_skip`" if model.clip_skip else own,
        )
    length = model.max_token_length
    return ClipTextEncoder(
        network,
        tokenizer,
        taken,
        limit=None if length == "auto" else length,
        masked=model.apply_lg_attn_mask,
        projection=projection,
    )
