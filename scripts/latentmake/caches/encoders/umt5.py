"""umT5, Wan's text encoder: captions to the embeddings of their own tokens.

Weights: a transformers folder, or the one file of the original release
(models_t5_umt5-xxl-enc-bf16.pth, or .safetensors of the same names) with a tokenizer's folder.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from transformers import UMT5Config, UMT5EncoderModel

from latentmake.caches.encoders.local_state import Kind, State, load_network, place
from latentmake.caches.encoders.text import TextEncoder
from latentmake.caches.tokenizers import TokenCache, clean_caption
from latentmake.caches.tokenizers import load as load_tokenizer
from latentmake.config.weights import TextWeights
from latentmake.models.files import T5_LENGTH

_LARGEST_FP8 = torch.finfo(torch.float8_e4m3fn).max
# Names inside a block: the original's, then transformers'.
_BLOCK = {
    "norm1": "layer.0.layer_norm",
    "attn.q": "layer.0.SelfAttention.q",
    "attn.k": "layer.0.SelfAttention.k",
    "attn.v": "layer.0.SelfAttention.v",
    "attn.o": "layer.0.SelfAttention.o",
    "pos_embedding.embedding": "layer.0.SelfAttention.relative_attention_bias",
    "norm2": "layer.1.layer_norm",
    "ffn.gate.0": "layer.1.DenseReluDense.wi_0",
    "ffn.fc1": "layer.1.DenseReluDense.wi_1",
    "ffn.fc2": "layer.1.DenseReluDense.wo",
}
_OUTSIDE = {
    "token_embedding.weight": "shared.weight",
    "norm.weight": "encoder.final_layer_norm.weight",
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
    network = load_network(_KIND, weights)
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
        # The original's names, in files of complete models with the prefix of the encoder.
        state = {
            _modern_name(name.removeprefix("encoder.")): value for name, value in state.items()
        }
    state = {name: value for name, value in state.items() if not re.match(_FOREIGN, name)}
    embedding = ("shared.weight", "encoder.embed_tokens.weight")  # one tensor of two names
    found = next((state[name] for name in embedding if name in state), None)
    return state if found is None else dict.fromkeys(embedding, found) | state


def _modern_name(name: str) -> str:
    if match := re.fullmatch(r"blocks\.(\d+)\.(.+)\.weight", name):
        part = _BLOCK.get(match[2])
        return name if part is None else f"encoder.block.{match[1]}.{part}.weight"
    return _OUTSIDE.get(name, name)


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


_KIND = Kind(
    name="umT5",
    from_pretrained=UMT5EncoderModel.from_pretrained,
    models=("umt5",),
    content="T5",
    hint="set `text` to models_t5_umt5-xxl-enc-bf16.pth or its .safetensors, or to the "
    "`text_encoder` folder of a Wan pipeline",
    convert=_converted,
    infer=_inferred,
    build=lambda config: UMT5EncoderModel(UMT5Config.from_dict(config)),
    foreign=_FOREIGN,
)
