"""Estimates of trainings of Wan's network: memory and disk, from headers and settings alone."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import WanTransformer3DModel
from latentmake.config.root import parse
from latentmake.training.lora import add_adapter
from latentmake.training.order import Record, Wanted
from latentmake.training.wan.estimate import estimate_training, largest_latent
from latentmake.training.wan.recipe import load_transformer, write_lora
from memory_world import Sizes

SMALL = Sizes(dim=1536, heads=12, ffn_dim=8960, layers=30)  # 1.3B


LARGE = Sizes(dim=5120, heads=40, ffn_dim=13824, layers=40)  # 14B


def config(dit: str, second: str | None = None, **trainer: Any) -> Any:
    return parse(
        {
            "datasets": {"films": {"path": "data", "target_frames": [33, 81], "fit": "crop"}},
            "models": {
                "wan": {
                    "task": "t2v-A14B" if second else "t2v-1.3B",
                    "vae": "vae",
                    "text": {"path": "text", "tokenizer": "tokenizer"},
                    "dit": dit,
                    "dit_high_noise": second,
                }
            },
            "runs": {
                "films": {
                    "datasets": ["films"],
                    "model": "wan",
                    "resolutions": [[416, 240], [832, 480]],
                    "trainer": {"kind": "wan", **trainer},
                }
            },
        }
    )


def write_header(path: Path, sizes: Sizes) -> None:
    """Write a file of weights in bfloat16 whose numbers are a hole."""
    header: dict[str, Any] = {}
    end = 0
    for name, shape in sizes.shapes().items():
        start, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)


def test_of_the_real_network_and_81_frames(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_header(tmp_path / "dit.safetensors", SMALL)
    settings = config("dit.safetensors", max_steps=50)
    assert largest_latent(settings, settings.runs["films"]) == (21, 60, 104)
    found = estimate_training(settings, "films", settings.models["wan"])
    assert sum(found.memory.values()) == pytest.approx(10.8e9, rel=0.05)
    assert found.memory["weights"] == pytest.approx(2.84e9, rel=0.02)
    assert found.note.startswith("about 10.8 GB of GPU memory (weights 2.8 GB, LoRA ")
    assert found.note.endswith(" GB of disk")
    larger = config("dit.safetensors", gradient_checkpointing=False, rank=64)
    other = estimate_training(larger, "films", larger.models["wan"])
    assert other.memory["activations"] > 8 * found.memory["activations"]
    assert other.need.size == 2 * found.need.size


def test_of_two_networks_the_one_in_use_is_on_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_header(tmp_path / "dit.safetensors", LARGE)
    settings = config("dit.safetensors", "dit.safetensors", rank=32)
    found = estimate_training(settings, "films", settings.models["wan"])
    assert found.memory["weights"] == pytest.approx(28.6e9, rel=0.01)
    assert sum(found.memory.values()) == pytest.approx(57.7e9, rel=0.01)


def test_time_is_that_of_the_last_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_header(tmp_path / "dit.safetensors", SMALL)
    settings = config("dit.safetensors", steps=600)
    wanted = Wanted(data="d", settings="s", weights="w")
    record = Record(wanted=wanted, steps=10, seconds=42.0, loss_start=1, loss_end=1)
    record.write(tmp_path / "runs/films/training.json")
    found = estimate_training(settings, "films", settings.models["wan"])
    assert found.note.endswith("; 42 min at 4.2 s a step, as in the last training")
    (tmp_path / "runs/films/training.json").write_text("{")
    assert estimate_training(settings, "films", settings.models["wan"]).note.endswith("of disk")


def test_disk_is_that_of_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    WanTransformer3DModel(
        num_attention_heads=2, attention_head_dim=128, text_dim=24, freq_dim=16, ffn_dim=32,
        num_layers=2, in_channels=16, out_channels=16,
    ).save_pretrained("dit")  # fmt: skip
    settings = config("dit", checkpoints_total_limit=1, save_every_n_steps=250, steps=1000)
    network = load_transformer("dit")
    targets = settings.runs["films"].trainer.target_modules
    add_adapter(network, rank=32, alpha=32, target_modules=targets)
    write_lora(network, tmp_path / "lora")
    results = sum(file.stat().st_size for file in (tmp_path / "lora").iterdir())
    weights = [each for each in network.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(weights)
    sum(weight.sum() for weight in weights).backward()
    optimizer.step()
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    checkpoint = 4 * sum(map(torch.Tensor.numel, weights)) + (tmp_path / "state.pt").stat().st_size
    found = estimate_training(settings, "films", settings.models["wan"])
    assert found.need.size == pytest.approx(5 * results + 2 * checkpoint, rel=0.05)
