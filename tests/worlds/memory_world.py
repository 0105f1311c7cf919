"""Memory of a training step of Wan's network, counted over tensors without data."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from diffusers import WanTransformer3DModel
from latentmake.training.lora import add_adapter
from torch._subclasses.fake_tensor import FakeTensorMode
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


class Counted(NamedTuple):
    """Bytes: of the frozen weights; before the second step; at its peak."""

    weights: int
    before: int
    peak: int


def count_step(
    dit: Sizes,
    *,
    latent: tuple[int, int, int],
    targets: Sequence[str],
    rank: int,
    text_tokens: int = 512,
    half: bool = True,
    gradient_checkpointing: bool = True,
    fake: bool = True,
) -> Counted:
    """Count the memory of a training step; `fake` tensors have shapes, and take none."""
    with torch.device("meta"):
        network: Any = WanTransformer3DModel(**dit.settings())
    exact = set(network._keep_in_fp32_modules)
    dtype = torch.bfloat16 if half else torch.float32
    for name, parameter in network.named_parameters():
        kept = exact & set(name.split("."))
        parameter.data = parameter.data.to(torch.float32 if kept else dtype)
    with torch.device("meta"):
        add_adapter(network, rank=rank, target_modules=targets, autocast=half)
    network.train()
    if gradient_checkpointing:
        network.enable_gradient_checkpointing()
    mode: Any = FakeTensorMode() if fake else nullcontext()
    with mode:
        weights = _materialize(network)
        return _step(network, dit, latent, text_tokens, dtype, weights)


def _materialize(network: Any) -> int:
    """Give a network on the meta device tensors; return the bytes of those that are frozen."""
    found = 0
    for module in network.modules():
        for name, value in list(module._parameters.items()):
            if value is not None:
                made = torch.zeros(value.shape, dtype=value.dtype)
                module._parameters[name] = torch.nn.Parameter(made, value.requires_grad)
                found += 0 if value.requires_grad else made.nbytes
        for name, value in list(module._buffers.items()):
            module._buffers[name] = torch.zeros(value.shape, dtype=value.dtype)
    return found


def _step(
    network: Any,
    dit: Sizes,
    latent: tuple[int, int, int],
    text_tokens: int,
    dtype: torch.dtype,
    weights: int,
) -> Counted:
    with Living() as living:
        for value in network.parameters():
            living.add(value)
        trained = [value for value in network.parameters() if value.requires_grad]
        optimizer = torch.optim.AdamW(trained)
        before = 0
        for _ in range(2):
            before = living.peak = living.bytes
            given = torch.zeros(1, dit.channels, *latent, dtype=dtype)
            text = torch.zeros(1, text_tokens, dit.text_dim, dtype=dtype)
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
                found = network(given, torch.zeros(1), text).sample
                loss = torch.nn.functional.mse_loss(found.float(), torch.zeros(found.shape))
            loss.backward()
            del found, loss, given, text
            peak = living.peak
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return Counted(weights, before, peak)
