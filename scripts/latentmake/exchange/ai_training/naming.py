"""The naming of ai-training (github.com/ppbrown/ai-training, trainer/cache-utils).

    a.img_sdvae, a.img_sdxl    safetensors, `latent` [C, h, w] in float32, posterior mean, unscaled
    a.txt_t5cache              safetensors, `emb` [T, D] in bfloat16, of the caption's own length
    a.txt_clipl                safetensors, `emb` [T, D] in float32, padded

All lie beside the image `a.jpg`. Its training reads the one tensor by its name and passes over the
header's metadata.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from latentmake.errors import CacheError
from latentmake.files import cachefile

if TYPE_CHECKING:
    import torch

__all__ = ["dtype", "find", "place", "read", "write"]

_TENSORS = {"latents": "latent", "text": "emb"}


def find(base: str, ending: str) -> Path | None:
    """Return an item's file, where there is one."""
    path = Path(f"{base}{ending}")
    return path if path.is_file() else None


def place(base: str, ending: str, original: tuple[int, int]) -> Path:
    """Return where an item's file is written."""
    return Path(f"{base}{ending}")


def dtype(kind: str, padded: bool) -> str:
    """Return the number format of `latents` or `text`: bfloat16 for T5, which pads nothing."""
    return "bfloat16" if kind == "text" and not padded else "float32"


def read(kind: str, padded: bool, data: bytes) -> torch.Tensor:
    """Return the tensor that a file's bytes hold.

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
    found, wanted = str(tensors[name].dtype).removeprefix("torch."), dtype(kind, padded)
    if found != wanted:
        raise CacheError(f"`{name}` is in {found}, not in {wanted}")
    return tensors[name]


def write(kind: str, padded: bool, tensor: torch.Tensor, stamp: Mapping[str, str]) -> bytes:
    """Return the bytes of a file."""
    import torch

    wanted = torch.bfloat16 if dtype(kind, padded) == "bfloat16" else torch.float32
    return cachefile.serialize({_TENSORS[kind]: tensor.to(wanted)}, stamp)
