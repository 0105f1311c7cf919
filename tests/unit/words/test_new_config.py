"""The model's section that `latentmake init` writes: a dtype that weights and GPUs suggest."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from latentmake.config.architectures import ARCHITECTURES
from latentmake.files.safetensors import Tensor
from latentmake.words.found import Model, Part, found_model
from latentmake.words.model_section import Section
from latentmake.words.new_config import dtype_of
from safetensors.torch import save_file


@pytest.mark.parametrize(
    ("kind", "weights", "capabilities", "dtype"),
    [
        ("sd", "F32", "", "float16"),
        ("sd", "F16", "", "bfloat16"),
        ("sd", "BF16", "", "bfloat16"),
        ("sd", "F32", "8.0", "bfloat16"),
        ("sd", "F32", "9.0\n7.5", "float16"),
        ("sdscripts", "F32", "", "bfloat16"),
    ],
)
def test_the_dtype_of_new_caches_is_that_of_the_weights_or_the_gpus(
    kind: str,
    weights: str,
    capabilities: str,
    dtype: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\nprintf '{capabilities}'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    network = Part(tmp_path, tmp_path, {"conv_in.weight": Tensor(weights, (1,), 0, 4)})
    model = Model(ARCHITECTURES["sd1"], None, [network], [network], tmp_path)
    assert dtype_of(Section(model, kind, tmp_path, network=network)) == dtype


@pytest.mark.parametrize("shards", [(".fp16",), (".fp16-00001-of-00002", ".fp16-00002-of-00002")])
def test_a_network_of_one_variant_is_found(tmp_path: Path, shards: tuple[str, ...]) -> None:
    unet = tmp_path / "sd15/unet"
    unet.mkdir(parents=True)
    index = "diffusion_pytorch_model.safetensors.index.fp16.json"
    for each in ("config.json", *([index] if len(shards) > 1 else ())):
        (unet / each).write_text("{}")
    name = "down_blocks.{}.attentions.0.transformer_blocks.0.attn2.to_k.weight"
    for number, ending in enumerate(shards):
        file = unet / f"diffusion_pytorch_model{ending}.safetensors"
        save_file({name.format(number): torch.ones(32, 768)}, file)
    (network,) = found_model(tmp_path / "sd15").networks
    assert (network.path, len(network.tensors)) == (unet, len(shards))
    save_file({name.format(5): torch.ones(32, 768)}, unet / "diffusion_pytorch_model.safetensors")
    (network,) = found_model(tmp_path / "sd15").networks
    assert [*network.tensors] == [name.format(5)]
