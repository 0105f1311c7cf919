"""Sizes of Wan's DiT, read off the shapes of its tensors, and the tensors that it has of them.

The network is diffusers' WanTransformer3DModel; names are diffusers'.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

IN_BLOCK = re.compile(r"^blocks\.(\d+)\.")
"""Beginning of the names of a block's tensors."""

_HEAD = 128  # width of an attention head in all of Wan's models
_IMAGE = "condition_embedder.image_embedder"
_PATCH = 5  # dimensions of the patch embedding's weight: width, channels, and a patch's three
# Keys of the original release's config.json, and diffusers' for the same.
_ORIGINAL_KEYS = {
    "in_dim": "in_channels",
    "out_dim": "out_channels",
    "num_heads": "num_attention_heads",
    **{key: key for key in ("ffn_dim", "freq_dim", "num_layers")},
}
_Shape = tuple[int, ...]


class DitShapes(NamedTuple):
    """Sizes of a Wan DiT.

    Attributes:
        in_channels: of the input, 16 or, with an image's condition, 36.
        out_channels: of the output.
        dim: width of the blocks.
        heads: of the attention.
        ffn_dim: width inside a block's feed-forward part.
        layers: number of blocks.
        text_dim: width of the text's embeddings.
        freq_dim: width of a timestep's embedding.
        image_dim: width of the CLIP image encoder's output; None where it takes none.
        image_tokens: length of their position embedding; None where there is none.
        patch: latent frames, rows and columns of a token.
    """

    in_channels: int
    out_channels: int
    dim: int
    heads: int
    ffn_dim: int
    layers: int
    text_dim: int = 4096
    freq_dim: int = 256
    image_dim: int | None = None
    image_tokens: int | None = None
    patch: tuple[int, int, int] = (1, 2, 2)

    def settings(self) -> dict[str, Any]:
        """Return the configuration of diffusers' WanTransformer3DModel."""
        return {
            "patch_size": list(self.patch),
            "num_attention_heads": self.heads,
            "attention_head_dim": self.dim // self.heads,
            "in_channels": self.in_channels,
            "out_channels": self.out_channels,
            "text_dim": self.text_dim,
            "freq_dim": self.freq_dim,
            "ffn_dim": self.ffn_dim,
            "num_layers": self.layers,
            "image_dim": self.image_dim,
            "added_kv_proj_dim": None if self.image_dim is None else self.dim,
            "pos_embed_seq_len": self.image_tokens,
        }

    def tensors(self) -> dict[str, _Shape]:
        """Return the shape of each of its tensors by name."""
        dim = self.dim
        found: dict[str, _Shape] = {
            **_layer("patch_embedding", dim, self.in_channels, *self.patch),
            **_layer("condition_embedder.time_embedder.linear_1", dim, self.freq_dim),
            **_layer("condition_embedder.time_embedder.linear_2", dim, dim),
            **_layer("condition_embedder.time_proj", 6 * dim, dim),
            **_layer("condition_embedder.text_embedder.linear_1", dim, self.text_dim),
            **_layer("condition_embedder.text_embedder.linear_2", dim, dim),
            **_layer("proj_out", self.out_channels * math.prod(self.patch), dim),
            "scale_shift_table": (1, 2, dim),
        }
        if self.image_dim is not None:
            found |= {
                **_layer(f"{_IMAGE}.norm1", self.image_dim),
                **_layer(f"{_IMAGE}.ff.net.0.proj", self.image_dim, self.image_dim),
                **_layer(f"{_IMAGE}.ff.net.2", dim, self.image_dim),
                **_layer(f"{_IMAGE}.norm2", dim),
            }
        if self.image_tokens is not None:
            found[f"{_IMAGE}.pos_embed"] = (1, self.image_tokens, self.image_dim or 0)
        block = self._block()
        for number in range(self.layers):
            found |= {f"blocks.{number}.{name}": shape for name, shape in block.items()}
        return found

    def _block(self) -> dict[str, _Shape]:
        dim = self.dim
        found: dict[str, _Shape] = {
            "scale_shift_table": (1, 6, dim),
            **_layer("norm2", dim),
            **_layer("ffn.net.0.proj", self.ffn_dim, dim),
            **_layer("ffn.net.2", dim, self.ffn_dim),
        }
        for attention in ("attn1", "attn2"):
            for name in ("to_q", "to_k", "to_v", "to_out.0"):
                found |= _layer(f"{attention}.{name}", dim, dim)
            found |= {f"{attention}.{name}.weight": (dim,) for name in ("norm_q", "norm_k")}
        if self.image_dim is not None:
            for name in ("add_k_proj", "add_v_proj"):
                found |= _layer(f"attn2.{name}", dim, dim)
            found["attn2.norm_added_k.weight"] = (dim,)
        return found


def _layer(name: str, *shape: int) -> dict[str, _Shape]:
    return {f"{name}.weight": shape, f"{name}.bias": shape[:1]}


def shapes_of(
    shapes: Mapping[str, Sequence[int]], config: Mapping[str, Any] | None = None
) -> DitShapes:
    """Return the sizes of a DiT from the shapes of its tensors.

    The number of heads is the configuration's, else that of Wan's own models, whose heads are 128
    wide.

    Args:
        shapes: by names of diffusers.
        config: content of a config.json of diffusers or of the original release.

    Raises:
        ValueError: a tensor is missing, the configuration says something else, or nothing tells the
            number of heads.
    """

    def of(name: str, dimensions: int = 2) -> Sequence[int]:
        if name not in shapes:
            raise ValueError(f"lacks {name}")
        if len(shapes[name]) != dimensions or 0 in shapes[name]:
            raise ValueError(f"has {name} of shape {list(shapes[name])}")
        return shapes[name]

    dim, channels, *patch = of("patch_embedding.weight", _PATCH)
    said = {_ORIGINAL_KEYS.get(key, key): value for key, value in (config or {}).items()}
    heads = said.get("num_attention_heads")
    if heads is None and dim % _HEAD:
        raise ValueError(
            f"has blocks {dim} wide, and no config.json beside it tells their number of heads"
        )
    heads = dim // _HEAD if heads is None else heads
    if not isinstance(heads, int) or heads < 1 or dim % heads:
        raise ValueError(f"has blocks {dim} wide, and its config.json says {heads} heads")
    numbers = [int(match[1]) for name in shapes if (match := IN_BLOCK.match(name))]
    image, position = f"{_IMAGE}.norm1.weight", f"{_IMAGE}.pos_embed"
    found = DitShapes(
        in_channels=channels,
        out_channels=of("proj_out.weight")[0] // math.prod(patch),
        dim=dim,
        heads=heads,
        ffn_dim=of("blocks.0.ffn.net.0.proj.weight")[0],
        layers=max(numbers) + 1,
        text_dim=of("condition_embedder.text_embedder.linear_1.weight")[1],
        freq_dim=of("condition_embedder.time_embedder.linear_1.weight")[1],
        image_dim=of(image, 1)[0] if image in shapes else None,
        image_tokens=of(position, 3)[1] if position in shapes else None,
        patch=(patch[0], patch[1], patch[2]),
    )
    for key, value in found.settings().items():
        if key in said and said[key] != value:
            raise ValueError(f"has {key} {value}, and its config.json says {said[key]}")
    return found


def tensor_faults(dit: DitShapes, shapes: Mapping[str, Sequence[int]]) -> Iterator[str]:
    """Yield what is wrong with tensors: missing, unknown, or of another shape than a DiT's."""
    expected = dit.tensors()
    yield from (f"lacks {name}" for name in expected if name not in shapes)
    yield from (f"holds {name}, which no Wan DiT has" for name in shapes if name not in expected)
    for name, shape in expected.items():
        if name in shapes and tuple(shapes[name]) != shape:
            yield f"has {name} of shape {list(shapes[name])} instead of {list(shape)}"
