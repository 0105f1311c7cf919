"""Operations of encoders and of a training step are those that torch counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKL, AutoencoderKLWan, WanTransformer3DModel
from latentmake.config.models import Model
from latentmake.models.flops import latents_flops, text_flops, training_flops
from latentmake.models.wan_shapes import DitShapes
from peft import LoraConfig
from torch.utils.flop_counter import FlopCounterMode

SMALL = DitShapes(16, 16, dim=1536, heads=12, ffn_dim=8960, layers=2)


def hole(path: Path, size: int) -> str:
    """Write a file of weights that is nothing but a size."""
    with path.open("wb") as file:
        file.truncate(size)
    return str(path)


def test_encoding_a_clip_takes_what_torch_counts(tmp_path: Path) -> None:
    with torch.device("meta"), torch.no_grad(), FlopCounterMode(display=False) as counted:
        vae = AutoencoderKLWan()
        vae._encode(torch.empty(1, 3, 9, 240, 416))
    size = 4 * sum(weight.numel() for weight in vae.parameters())
    settings: dict[str, Any] = {
        "vae": hole(tmp_path / "vae.safetensors", size),
        "text": {"path": hole(tmp_path / "t5.safetensors", 10**9), "tokenizer": "tokenizer"},
    }
    model = Model.model_validate({"task": "t2v-1.3B", **settings})
    found = latents_flops(model)
    assert found is not None
    assert found * 9 * 240 * 416 == pytest.approx(counted.get_total_flops(), rel=0.05)
    doubled = latents_flops(Model.model_validate({"task": "i2v-A14B", **settings}))
    assert doubled == 2 * found
    assert text_flops(model) == 1e9


def test_encoding_an_image_takes_what_torch_counts(tmp_path: Path) -> None:
    with torch.device("meta"), torch.no_grad(), FlopCounterMode(display=False) as counted:
        vae = AutoencoderKL(
            block_out_channels=(128, 256, 512, 512),
            down_block_types=("DownEncoderBlock2D",) * 4,
            up_block_types=("UpDecoderBlock2D",) * 4,
            layers_per_block=2,
        )
        vae.encode(torch.empty(1, 3, 512, 512))
    size = 4 * sum(weight.numel() for weight in vae.parameters())
    place = hole(tmp_path / "vae.safetensors", size)
    found = latents_flops(Model.model_validate({"vae": place, "text": "text"}))
    assert found is not None
    assert found * 512**2 == pytest.approx(counted.get_total_flops(), rel=0.02)
    hub = {"hub": "a/b", "revision": "1" * 40}
    assert latents_flops(Model.model_validate({"vae": hub, "text": "text"})) is None


@pytest.mark.parametrize("gradient_checkpointing", [True, False])
def test_a_step_takes_what_torch_counts(gradient_checkpointing: bool) -> None:
    latent = (5, 60, 104)
    with torch.device("meta"):
        network = WanTransformer3DModel(
            num_layers=2, num_attention_heads=12, attention_head_dim=128, ffn_dim=8960
        ).requires_grad_(False)
        targets = ["to_q", "to_k", "to_v", "to_out.0"]
        network.add_adapter(LoraConfig(r=32, target_modules=targets))
        if gradient_checkpointing:
            network.enable_gradient_checkpointing()
        network.train()
        inputs = torch.empty(1, 16, *latent), torch.empty(1), torch.empty(1, 512, 4096)
        with FlopCounterMode(display=False) as counted:
            network(*inputs).sample.sum().backward()
    found = training_flops(
        SMALL,
        latent,
        batch=1,
        text_tokens=512,
        gradient_checkpointing=gradient_checkpointing,
    )
    assert found == pytest.approx(counted.get_total_flops(), rel=0.15)
