"""Cache files of ai-training's scripts (trainer/cache-utils).

    a.img_sdvae, a.img_sdxl    safetensors, `latent` [C, h, w] in float32, posterior mean, unscaled
    a.txt_t5cache              safetensors, `emb` [T, D] in bfloat16, of the caption's own length
    a.txt_clipl                safetensors, `emb` [T, D] in float32, padded

All lie beside the image `a.jpg`. Its training reads that tensor by name and ignores the header's
metadata.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from latentmake.errors import CacheError
from latentmake.files import cachefile

if TYPE_CHECKING:
    import torch

_TENSORS = {"latents": "latent", "text": "emb"}


def dtype_of(kind: str, padded: bool) -> str:
    """Return the dtype of `latents` or `text`: bfloat16 for T5, which pads nothing."""
    return "bfloat16" if kind == "text" and not padded else "float32"


def from_bytes(kind: str, padded: bool, data: bytes) -> torch.Tensor:
    """Return latents [C, h, w] or an embedding [T, D] from a file's bytes.

    Raises:
        CacheError: it is no safetensors file, or holds another tensor.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load

    name = _TENSORS[kind]
    try:
        tensors = load(data)
    except (SafetensorError, ValueError, KeyError, RuntimeError, TypeError):
        raise CacheError("is cut short or no safetensors file") from None
    if tensors.keys() != {name}:
        held = " and ".join(f"`{each}`" for each in sorted(tensors)) or "nothing"
        raise CacheError(f"holds {held} in place of `{name}` alone")
    found, wanted = str(tensors[name].dtype).removeprefix("torch."), dtype_of(kind, padded)
    if found != wanted:
        raise CacheError(f"`{name}` is in {found}, not in {wanted}")
    return tensors[name]


def to_bytes(kind: str, padded: bool, tensor: torch.Tensor, stamp: Mapping[str, str]) -> bytes:
    """Return a file's bytes, with our stamp as metadata."""
    import torch

    dtype: torch.dtype = getattr(torch, dtype_of(kind, padded))
    return cachefile.serialize({_TENSORS[kind]: tensor.to(dtype)}, stamp)
