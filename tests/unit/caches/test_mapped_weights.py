"""Networks are loaded without drawing or copying weights, and equal those that libraries load."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from demo.text import t5_tokenizer
from diffusers import AutoencoderKL
from latentmake.caches.encoders.text import load_text_model
from latentmake.caches.encoders.vae import load_vae
from latentmake.config.weights import TextWeights, Weights
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    T5Config,
    T5EncoderModel,
    UMT5Config,
    UMT5EncoderModel,
)

CPU = torch.device("cpu")
CLIP: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 37, "num_hidden_layers": 2}
CLIP |= {"num_attention_heads": 4, "vocab_size": 600, "projection_dim": 16}
T5: dict[str, Any] = {"vocab_size": 300, "d_model": 32, "d_kv": 8, "d_ff": 37, "num_heads": 4}
T5 |= {"num_layers": 2}
TEXTS: dict[str, Callable[[], Any]] = {
    "CLIP": lambda: CLIPTextModel(CLIPTextConfig(**CLIP)),
    "CLIP with its projection": lambda: CLIPTextModelWithProjection(CLIPTextConfig(**CLIP)),
    "T5": lambda: T5EncoderModel(T5Config(**T5)),
    "UMT5": lambda: UMT5EncoderModel(UMT5Config(**T5)),
}


def vae() -> AutoencoderKL:
    return AutoencoderKL(
        block_out_channels=(8, 16),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        norm_num_groups=8,
    ).eval()


def encoded(network: AutoencoderKL) -> torch.Tensor:
    image = torch.linspace(-1, 1, 3 * 24 * 40).reshape(1, 3, 24, 40)
    with torch.inference_mode():
        return network.encode(image).latent_dist.parameters


def embedded(network: Any) -> torch.Tensor:
    ids = torch.arange(20)[None] * 7
    with torch.inference_mode():
        return network(input_ids=ids).last_hidden_state


def undrawn(load: Callable[[], Any]) -> Any:
    """Return what a function loads; it must draw no number."""
    before = torch.get_rng_state()
    found = load()
    assert torch.equal(torch.get_rng_state(), before)
    return found


def is_mapped(file: Path) -> bool:
    return str(file.resolve()) in Path("/proc/self/maps").read_text()


@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shard", ["1GB", "20KB"])
def test_a_vae_equals_that_of_diffusers(tmp_path: Path, stored: torch.dtype, shard: str) -> None:
    vae().to(stored).save_pretrained(tmp_path, max_shard_size=shard)
    loaded = undrawn(lambda: load_vae(Weights(path=str(tmp_path)), CPU, torch.float32))
    files = sorted(tmp_path.glob("*.safetensors"))
    assert (len(files) > 1) == (shard == "20KB")
    assert all(map(is_mapped, files)) == (stored == torch.float32)
    theirs = AutoencoderKL.from_pretrained(tmp_path, low_cpu_mem_usage=False)
    assert torch.equal(encoded(loaded), encoded(theirs))
    latents = torch.ones(1, 4, 4, 4)
    assert torch.equal(loaded.decode(latents)[0], theirs.decode(latents)[0])


def test_a_job_keeps_no_decoder_of_a_vae(tmp_path: Path) -> None:
    vae().save_pretrained(tmp_path)
    place = Weights(path=str(tmp_path))
    loaded = load_vae(place, CPU, torch.float32, decoder=False)
    assert not [name for name in loaded.state_dict() if name.startswith("decoder.")]
    assert torch.equal(encoded(loaded), encoded(load_vae(place, CPU, torch.float32)))


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", TEXTS)
def test_a_text_encoder_equals_that_of_transformers(
    tmp_path: Path, kind: str, stored: torch.dtype
) -> None:
    made = TEXTS[kind]().to(stored)
    made.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    if kind in ("CLIP", "T5"):
        file.unlink()
        file = tmp_path / "pytorch_model.bin"
        torch.save(made.state_dict(), file)
    t5_tokenizer(["a cat"]).save_pretrained(tmp_path)
    place = TextWeights(path=str(tmp_path), tokenizer=str(tmp_path))
    loaded = undrawn(lambda: load_text_model(place, CPU, torch.float32).network)
    assert is_mapped(file) == (stored == torch.float32)
    theirs = type(made).from_pretrained(tmp_path, dtype=torch.float32)
    assert torch.equal(embedded(loaded), embedded(theirs))
    names = [name for name, _ in loaded.named_parameters()]
    assert names == [name for name, _ in theirs.named_parameters()]  # tied weights are one
