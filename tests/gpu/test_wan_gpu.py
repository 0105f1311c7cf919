"""Wan's encoders on a CUDA device: what they give is what a CPU gives, to rounding."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import wan_world
from latentmake.config.weights import TextWeights, Weights
from latentmake.encode.encoders.text import load_umt5
from latentmake.encode.encoders.wan import load_wan_vae

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(
    ("dtype", "difference"), [(torch.float32, 1e-3), (torch.bfloat16, 0.3)], ids=str
)
def test_the_vae_gives_what_it_gives_on_a_cpu(
    tmp_path: Path, dtype: torch.dtype, difference: float
) -> None:
    weights = Weights(path=str(wan_world.write_wan_vae(tmp_path)[".pth"]))
    pixels = torch.randint(0, 256, (2, 5, 64, 48, 3), dtype=torch.uint8)
    slow = load_wan_vae(weights, CPU, torch.float32).encode(pixels, dtype)
    fast = load_wan_vae(weights, CUDA, dtype).encode(pixels, dtype).cpu()
    assert (slow - fast).abs().max() < difference
    assert torch.cosine_similarity(slow.flatten(), fast.flatten(), dim=0) > 0.999


@pytest.mark.parametrize("fp8", [False, True])
def test_umt5_gives_what_it_gives_on_a_cpu(tmp_path: Path, fp8: bool) -> None:
    paths = wan_world.write_umt5(tmp_path)
    weights = TextWeights(path=str(paths[".pth"]), tokenizer=str(paths["tokenizer"]))
    captions = list(wan_world.CAPTIONS)
    slow = load_umt5(weights, CPU, torch.float32).encode(captions)
    fast = load_umt5(weights, CUDA, torch.bfloat16, fp8=fp8).encode(captions)
    for own, theirs in zip(slow, fast, strict=True):
        one, other = own["hidden_state"], theirs["hidden_state"]
        assert one.shape == other.shape
        cosine = torch.cosine_similarity(one.float().flatten(), other.float().flatten(), dim=0)
        assert cosine > 0.98


def test_features_on_the_cpu_take_less_memory_and_change_no_bit(tmp_path: Path) -> None:
    weights = Weights(path=str(wan_world.write_wan_vae(tmp_path, base_dim=32)[".pth"]))
    vae = load_wan_vae(weights, CUDA, torch.bfloat16)
    pixels = torch.randint(0, 256, (1, 9, 480, 832, 3), dtype=torch.uint8)
    expected = vae.encode(pixels, torch.bfloat16)
    peaks = []
    for each in (vae, vae.frugal()):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        assert torch.equal(each.encode(pixels, torch.bfloat16), expected)
        peaks.append(torch.cuda.max_memory_allocated())
    assert peaks[1] < peaks[0]
