"""umT5, Wan's text encoder: captions to the embeddings of their own tokens.

Weights: a transformers folder, or the one file of the original release
(models_t5_umt5-xxl-enc-bf16.pth, or .safetensors of the same names) with a tokenizer's folder.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from transformers import UMT5EncoderModel

from latentmake.caches.encoders.local_state import State, load_network, place, renamed
from latentmake.caches.encoders.text import TextEncoder
from latentmake.caches.tokenizers import TokenCache, clean_caption
from latentmake.caches.tokenizers import load as load_tokenizer
from latentmake.config.weights import TextWeights
from latentmake.models.files import T5_LENGTH

_LARGEST_FP8 = torch.finfo(torch.float8_e4m3fn).max
# Patterns in the original's names, which files of complete models prefix with `encoder.`.
_NAMES = {
    r"^encoder\.": "",
    r"^blocks\.": "encoder.block.",
    r"^token_embedding\.": "shared.",
    r"^norm\.": "encoder.final_layer_norm.",
    r"\.norm1\.": ".layer.0.layer_norm.",
    r"\.norm2\.": ".layer.1.layer_norm.",
    r"\.attn\.": ".layer.0.SelfAttention.",
    r"\.pos_embedding\.embedding\.": ".layer.0.SelfAttention.relative_attention_bias.",
    r"\.ffn\.gate\.0\.": ".layer.1.DenseReluDense.wi_0.",
    r"\.ffn\.fc1\.": ".layer.1.DenseReluDense.wi_1.",
    r"\.ffn\.fc2\.": ".layer.1.DenseReluDense.wo.",
}
# In files of complete models; the last is ComfyUI's copy of the tokenizer.
_FOREIGN = r"decoder\.|lm_head\.|spiece_model"
_SCALES = (".scale_weight", ".weight_scale", "scaled_fp8")


class _EightBitLinear(torch.nn.Module):
    """Linear layer without bias, with unscaled weights in float8_e4m3fn.

    They are kept as plain bytes, untouched by conversions of the network to another dtype.
    """

    weight = None  # transformers would cast activations to the dtype of a `weight`

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        # Beyond its range this format has NaN, not infinity.
        values = weight.float().clamp(-_LARGEST_FP8, _LARGEST_FP8)
        self.register_buffer("packed", values.to(torch.float8_e4m3fn).view(torch.uint8))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        packed: torch.Tensor = self.get_buffer("packed")
        weight = packed.view(torch.float8_e4m3fn).to(values.dtype)
        return torch.nn.functional.linear(values, weight)


def load_umt5(
    weights: TextWeights, device: torch.device, dtype: torch.dtype, *, fp8: bool = False
) -> TextEncoder:
    """Load umT5 and its tokenizer for inference; `fp8` keeps linear layers in 8 bits.

    Wan pads to 512 tokens, masks the padding and strips it again. Masked tokens change only the
    order of sums, so here captions are padded to the longest of the batch.

    Raises:
        ModelError: something is missing, incomplete or of another kind.
    """
    network = load_network(
        weights,
        UMT5EncoderModel,
        "umT5",
        models=("umt5",),
        hint="set `text` to models_t5_umt5-xxl-enc-bf16.pth or its .safetensors, or to the "
        "`text_encoder` folder of a Wan pipeline",
        converted=_converted,
        inferred=_inferred,
        foreign=_FOREIGN,
    )
    tokenizer = load_tokenizer(weights)
    if fp8:
        for module in list(network.modules()):
            for name, child in module.named_children():
                if isinstance(child, torch.nn.Linear):
                    setattr(module, name, _EightBitLinear(child.weight))
    return TextEncoder(
        place(network, device, dtype),
        TokenCache(tokenizer, clean_caption),
        projection=None,
        max_length=min(weights.max_length or T5_LENGTH, T5_LENGTH),
        stored=torch.bfloat16,
    )


def _converted(state: State) -> State:
    """Name weights as transformers does, and drop a decoder's."""
    if any(name.endswith(_SCALES) for name in state):
        raise ValueError(
            "it is in 8 bits with scales, which cannot be read; `fp8_t5` brings 16 bits to 8"
        )
    if any("blocks.0.ffn.gate." in name for name in state):
        state = renamed(state, _NAMES)
    state = {name: value for name, value in state.items() if not re.match(_FOREIGN, name)}
    embedding = ("shared.weight", "encoder.embed_tokens.weight")  # one tensor of two names
    found = next((state[name] for name in embedding if name in state), None)
    return state if found is None else dict.fromkeys(embedding, found) | state


def _inferred(state: State) -> dict[str, Any]:
    first = "encoder.block.0.layer"
    buckets, heads = state[f"{first}.0.SelfAttention.relative_attention_bias.weight"].shape
    vocabulary, width = state["shared.weight"].shape
    blocks = [re.match(r"encoder\.block\.(\d+)\.", name) for name in state]
    return {
        "vocab_size": vocabulary,
        "d_model": width,
        "d_kv": state[f"{first}.0.SelfAttention.q.weight"].shape[0] // heads,
        "d_ff": state[f"{first}.1.DenseReluDense.wi_0.weight"].shape[0],
        "num_layers": 1 + max(int(match[1]) for match in blocks if match),
        "num_heads": heads,
        "relative_attention_num_buckets": buckets,
        "feed_forward_proj": "gated-gelu",  # the approximation by tanh
    }
