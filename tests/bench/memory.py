"""Memory of a training step by the trainer `sd`, counted without the numbers.

    PYTHONPATH=scripts python tests/bench/memory.py

It makes UNets of real sizes from fake tensors, which have shapes and no content, makes one step of
a LoRA, and counts the bytes of all tensors that are alive at its peak. A GPU is not needed. CUDA
takes about 0.5 GB more. As on CUDA, autocast computes norms in float32, and attention stores no
scores.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from diffusers import UNet2DConditionModel
from diffusers.utils import logging
from latentmake.trainers.lora import add_adapter
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "worlds"))
from memory_world import Living

RANK, TOKENS = 16, 77
TARGETS = ["to_q", "to_k", "to_v", "to_out.0"]
# Sizes of published models, from their config.json.
SD15: dict[str, Any] = {
    "cross_attention_dim": 768,
    "block_out_channels": (320, 640, 1280, 1280),
    "attention_head_dim": 8,
}
SDXL: dict[str, Any] = {
    "cross_attention_dim": 2048,
    "block_out_channels": (320, 640, 1280),
    "attention_head_dim": [5, 10, 20],
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    "transformer_layers_per_block": [1, 2, 10],
    "use_linear_projection": True,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 256,
    "projection_class_embeddings_input_dim": 2816,
}


def peak(sizes: dict[str, Any], side: int, batch: int, *, checkpointing: bool) -> int:
    """Return the bytes at the peak of a step: weights in bfloat16, LoRA and AdamW in float32.

    Args:
        sizes: of the UNet.
        side: of the pictures, in pixels.
        batch: how many of them.
        checkpointing: whether it computes activations twice rather than store them.
    """
    with torch.device("meta"):
        unet: Any = UNet2DConditionModel(**sizes).to(torch.bfloat16)
        add_adapter(unet, rank=RANK, alpha=RANK, target_modules=TARGETS)
    if checkpointing:
        unet.enable_gradient_checkpointing()
    unet.train()
    with FakeTensorMode(allow_non_fake_inputs=True), Living() as living:
        trained = _fill(unet)
        optimizer = [torch.zeros_like(each) for each in trained for _ in range(2)]
        latents = torch.randn(batch, 4, side // 8, side // 8, dtype=torch.bfloat16)
        text = torch.randn(batch, TOKENS, sizes["cross_attention_dim"], dtype=torch.bfloat16)
        more = {}
        if "addition_embed_type" in sizes:
            pooled = torch.randn(batch, 1280, dtype=torch.bfloat16)
            more = {"text_embeds": pooled, "time_ids": torch.zeros(batch, 6)}
        times = torch.zeros(batch, dtype=torch.long)
        gc.collect()
        living.peak = living.bytes
        with torch.autocast("cpu", torch.bfloat16):
            found = unet(latents, times, text, added_cond_kwargs=more, return_dict=False)[0]
            loss = functional.mse_loss(found.float(), torch.zeros_like(found).float())
        torch.autograd.backward([loss])
        del optimizer
    return int(living.peak)


def _fill(network: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Give a network parameters of the present kind of tensors; return those that are trained."""
    trained = []
    for module in network.modules():
        for name, old in module.named_parameters(recurse=False):
            is_trained = old.requires_grad
            values = torch.empty(old.shape, dtype=torch.float32 if is_trained else old.dtype)
            new = torch.nn.Parameter(values, requires_grad=is_trained)
            setattr(module, name, new)
            trained += [new] * is_trained
    return trained


def _in_float32(norm: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return a norm that computes as under CUDA's autocast."""

    def computed(*values: Any, **more: Any) -> torch.Tensor:
        return norm(*(x.float() if isinstance(x, torch.Tensor) else x for x in values), **more)

    return computed


def main() -> None:
    """Print a table."""
    logging.set_verbosity_error()
    for name in ("group_norm", "layer_norm"):
        setattr(functional, name, _in_float32(getattr(functional, name)))
    print(f"LoRA of rank {RANK}, bf16; GB     batch  plain  gradient_checkpointing")
    for name, sizes, side, batch in (
        ("Stable Diffusion 1.5", SD15, 512, 8),
        ("Stable Diffusion 1.5", SD15, 512, 1),
        ("SDXL", SDXL, 1024, 1),
        ("SDXL", SDXL, 1024, 4),
    ):
        plain, twice = (peak(sizes, side, batch, checkpointing=x) / 1e9 for x in (False, True))
        print(f"{name:<20} {side:>5} {batch:>9} {plain:>8.1f} {twice:>8.1f}", flush=True)


if __name__ == "__main__":
    main()
