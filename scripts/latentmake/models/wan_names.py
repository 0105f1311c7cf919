"""Names of the tensors of Wan's DiT: diffusers' and those of the original release.

The table follows diffusers' `convert_wan_transformer_to_diffusers`. ComfyUI's files, and those of
trainers that wrap the network, have a prefix before the original names.
"""

from __future__ import annotations

import re

_PREFIX = re.compile(r"^(model\.)?(diffusion_model\.)?(module\.)?")
_BLOCK = re.compile(r"^(blocks\.\d+\.)(.+)$")
# Of a block; a name is a layer's, or that of a parameter of the block itself.
_IN_BLOCK = {
    **{
        f"{attention}.{original}": f"{new}.{layer}"
        for attention, new in (("self_attn", "attn1"), ("cross_attn", "attn2"))
        for original, layer in (
            *(("q", "to_q"), ("k", "to_k"), ("v", "to_v"), ("o", "to_out.0")),
            *(("norm_q", "norm_q"), ("norm_k", "norm_k")),
        )
    },
    "cross_attn.k_img": "attn2.add_k_proj",
    "cross_attn.v_img": "attn2.add_v_proj",
    "cross_attn.norm_k_img": "attn2.norm_added_k",
    "norm3": "norm2",
    "ffn.0": "ffn.net.0.proj",
    "ffn.2": "ffn.net.2",
    "modulation": "scale_shift_table",
}
_OUTSIDE = {
    "time_embedding.0": "condition_embedder.time_embedder.linear_1",
    "time_embedding.2": "condition_embedder.time_embedder.linear_2",
    "time_projection.1": "condition_embedder.time_proj",
    "text_embedding.0": "condition_embedder.text_embedder.linear_1",
    "text_embedding.2": "condition_embedder.text_embedder.linear_2",
    "img_emb.proj.0": "condition_embedder.image_embedder.norm1",
    "img_emb.proj.1": "condition_embedder.image_embedder.ff.net.0.proj",
    "img_emb.proj.3": "condition_embedder.image_embedder.ff.net.2",
    "img_emb.proj.4": "condition_embedder.image_embedder.norm2",
    "img_emb.emb_pos": "condition_embedder.image_embedder.pos_embed",
    "head.head": "proj_out",
    "head.modulation": "scale_shift_table",
}
_LAYERS = {new: original for original, new in _IN_BLOCK.items()}
_ENDINGS = (".weight", ".bias")


def to_diffusers(name: str) -> str:
    """Return diffusers' name of a tensor; one that has it, or an unknown one, only loses a prefix.

    Args:
        name: in a file, such as `model.diffusion_model.blocks.0.self_attn.q.weight`.
    """
    bare = _PREFIX.sub("", name)
    layer, ending = bare, ""
    for each in _ENDINGS:
        if bare.endswith(each):
            layer, ending = bare.removesuffix(each), each
    if match := _BLOCK.match(layer):
        block, inner = match.groups()
        # diffusers' own norm2 is the original's norm3; the original's has no weights.
        return f"{block}{_IN_BLOCK.get(inner, inner)}{ending}"
    return f"{_OUTSIDE.get(layer, layer)}{ending}"


def original_layer(layer: str) -> str:
    """Return the original name of a layer in a block, of its name in diffusers.

    Args:
        layer: such as `blocks.0.attn1.to_q`.

    Raises:
        KeyError: it is none of a block's layers.
    """
    match = _BLOCK.match(layer)
    if match is None:
        raise KeyError(layer)
    return f"{match[1]}{_LAYERS[match[2]]}"
