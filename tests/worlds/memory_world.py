"""Memory of a training step of Wan's network, counted over tensors without data."""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch
from diffusers import WanTransformer3DModel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Living(TorchDispatchMode):
    """Count the bytes of all tensors that are alive, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.peak = 0
        self._sizes: dict[int, int] = {}

    def add(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata in self._sizes:
            return
        self._sizes[storage._cdata] = storage.nbytes()
        self.bytes += storage.nbytes()
        self.peak = max(self.peak, self.bytes)
        weakref.finalize(storage, self._forget, storage._cdata)

    def _forget(self, key: int) -> None:
        self.bytes -= self._sizes.pop(key)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for each in tree_leaves(found):
            if isinstance(each, torch.Tensor):
                self.add(each)
        return found


class Sizes(NamedTuple):
    """Sizes of a Wan DiT."""

    dim: int
    heads: int
    ffn_dim: int
    layers: int
    text_dim: int = 4096
    channels: int = 16

    def settings(self) -> dict[str, Any]:
        """Return the configuration of diffusers' WanTransformer3DModel."""
        return {
            "patch_size": [1, 2, 2],
            "num_attention_heads": self.heads,
            "attention_head_dim": self.dim // self.heads,
            "in_channels": self.channels,
            "out_channels": self.channels,
            "text_dim": self.text_dim,
            "ffn_dim": self.ffn_dim,
            "num_layers": self.layers,
        }

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of its tensors by their names in diffusers."""
        with torch.device("meta"):
            network: Any = WanTransformer3DModel(**self.settings())
        return {name: tuple(value.shape) for name, value in network.state_dict().items()}
