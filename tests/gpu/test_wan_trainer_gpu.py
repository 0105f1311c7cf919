"""Wan's network in training on a CUDA device: values, gradients, memory, files."""

from __future__ import annotations

import gc
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from dit_world import forms, image_dit, inputs, tiny_dit
from generation_world import generate, make_world, order_of
from latentmake.config.trainers import WanTrainer
from latentmake.runs.order import Record
from latentmake.trainers.lora import add_adapter, load_lora, lora_tensors
from latentmake.trainers.wan.dit import PREFIX, check_targets, lora_names, read_dit, shapes_of
from latentmake.trainers.wan.estimate import training_memory
from latentmake.trainers.wan.recipe import Denoiser, load_transformer, write_lora
from safetensors.torch import load_file
from wan_trainer_world import make_order, make_training
from wan_world import tiny_wan_vae

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DEVICE = torch.device("cuda")
TARGETS = ["to_q", "to_k", "to_v", "to_out.0"]


def on_device(given: dict[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {
        name: value.to(DEVICE, dtype if value.is_floating_point() else None)
        for name, value in given.items()
    }


def loss_of(network: Any, given: dict[str, torch.Tensor], target: torch.Tensor) -> torch.Tensor:
    """Return the loss of a prediction as the trainer computes it, under autocast."""
    with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
        predicted = network(**given).sample
    return torch.nn.functional.mse_loss(predicted.float(), target)


@pytest.mark.parametrize("make", [tiny_dit, image_dit])
def test_the_network_in_bfloat16_predicts_what_it_does_on_a_cpu(tmp_path: Path, make: Any) -> None:
    dit = make(heads=2, head=64, num_layers=2, ffn_dim=256)
    given = inputs(dit)
    expected = dit(**given).sample
    path = str(forms(dit, tmp_path)["original file"])
    network = load_transformer(path).to(DEVICE)
    with torch.no_grad(), torch.autocast(DEVICE.type, dtype=torch.bfloat16):
        found = network(**on_device(given, torch.bfloat16)).sample.float().cpu()
    assert torch.cosine_similarity(found.flatten(), expected.flatten(), dim=0) > 0.995
    kept = {each.dtype for name, each in network.named_parameters() if "norm2" in name}
    assert kept == {torch.float32}


def test_gradient_checkpointing_takes_less_memory_and_gives_the_same_gradients(
    tmp_path: Path,
) -> None:
    dit = tiny_dit(heads=4, head=128, num_layers=6, ffn_dim=2048)
    path = str(forms(dit, tmp_path)["folder"])
    tensors, config = read_dit(path)
    shapes = shapes_of(tensors)
    given = on_device(inputs(dit, size=(5, 32, 48)), torch.bfloat16)
    given = {name: value[:1] for name, value in given.items()}
    target = torch.randn(given["hidden_states"].shape, device=DEVICE)
    gradients, peaks = [], []
    for checkpointing in (True, True, False):
        torch.manual_seed(0)
        network = load_transformer(path).to(DEVICE)
        add_adapter(network, rank=8, target_modules=TARGETS, autocast=True)
        with torch.no_grad():
            for name, value in lora_tensors(network).items():
                if "lora_B" in name:
                    value.normal_(std=0.02)
        if checkpointing:
            network.enable_gradient_checkpointing()
        gc.collect()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        loss_of(network, given, target).backward()
        peaks.append(torch.cuda.max_memory_allocated() - before)
        trained = [each.grad for each in network.parameters() if each.requires_grad]
        gradients.append([each.flatten() for each in trained if each is not None])
        del network
    del gradients[0], peaks[0]  # the first pass took workspaces of cuBLAS, which stay
    found, expected = (torch.cat(each) for each in gradients)
    assert torch.cosine_similarity(found, expected, dim=0) > 0.999
    layers = check_targets(TARGETS, shapes, "targets")
    for checkpointing, peak in zip((True, False), peaks, strict=True):
        trainer = WanTrainer(
            kind="wan", rank=8, mixed_precision="bf16", gradient_checkpointing=checkpointing
        )
        told = training_memory(shapes, config, layers, (5, 32, 48), trainer, 7)
        assert peak == pytest.approx(told["activations"], rel=0.25)
    assert peaks[0] < 0.5 * peaks[1]


@pytest.mark.parametrize("optimizer", ["adamw", "adamw8bit"])
def test_a_lora_learns_and_its_files_give_on_a_cpu_what_it_gives_there(
    tmp_path: Path, optimizer: str
) -> None:
    if optimizer == "adamw8bit" and find_spec("bitsandbytes") is None:
        pytest.skip("bitsandbytes is not installed")
    dit = tiny_dit(heads=2, head=64, num_layers=2)
    path = str(forms(dit, tmp_path)["folder"])
    network = load_transformer(path).to(DEVICE)
    add_adapter(network, rank=8, alpha=4, target_modules=TARGETS, autocast=True)
    network.enable_gradient_checkpointing()
    parameters = [each for each in network.parameters() if each.requires_grad]
    assert {(each.dtype, each.device.type) for each in parameters} == {(torch.float32, DEVICE.type)}
    stepper: Any = torch.optim.AdamW
    if optimizer == "adamw8bit":
        from bitsandbytes.optim import AdamW8bit  # type: ignore[import-not-found, unused-ignore]

        stepper = AdamW8bit
    stepper = stepper(parameters, lr=1e-2)
    given = inputs(dit)
    target = torch.randn(given["hidden_states"].shape, device=DEVICE)
    losses = []
    for _ in range(40):
        loss = loss_of(network, on_device(given, torch.bfloat16), target)
        loss.backward()
        stepper.step()
        stepper.zero_grad(set_to_none=True)
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.8 * losses[0]
    with torch.no_grad(), torch.autocast(DEVICE.type, dtype=torch.bfloat16):
        expected = network(**on_device(given, torch.bfloat16)).sample.float().cpu()
    write_lora(network, tmp_path / "lora")
    fresh = load_transformer(path, dtype=torch.float32)
    load_lora(fresh, tmp_path / "lora" / lora_names()[0], PREFIX)
    found = fresh(**given).sample
    assert torch.cosine_similarity(found.flatten(), expected.flatten(), dim=0) > 0.995


@pytest.mark.parametrize("networks", [("dit",), ("dit", "dit_high_noise")])
def test_a_training_in_bfloat16_learns_and_writes_its_files(
    tmp_path: Path, networks: tuple[str, ...]
) -> None:
    two = {"task": "t2v-A14B", "boundary": 0.875} if len(networks) > 1 else {}
    settings: dict[str, Any] = {"mixed_precision": "bf16", "gradient_checkpointing": True}
    order = make_order(tmp_path, networks=networks, steps=80, **two, **settings)
    training = make_training(order)
    training.run()
    record = Record.read(training.files.record)
    assert record is not None and record.loss_end < 0.9 * record.loss_start
    for high_noise in (False, True)[: len(networks)]:
        for name in lora_names(high_noise=high_noise):
            weights = load_file(Path(order.output) / name)
            assert {value.dtype for value in weights.values()} == {torch.float32}


@pytest.mark.parametrize("room", [True, False])
def test_networks_that_are_lent_train_and_draw(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Denoiser, "fits", lambda *_: room)
    make_world(two=True)
    generate(order_of("a wave"))
    names = {clip.name.rpartition("_")[2] for clip in Path("runs/waves/generated").glob("*.mp4")}
    assert names == {"base.mp4", "adapter.mp4"}
    tiny_wan_vae(4).save_pretrained("vae")
    networks = ("dit", "dit_high_noise")
    order = make_order(
        tmp_path, networks=networks, task="t2v-A14B", boundary=0.875, prompts=True, steps=4,
        mixed_precision="bf16", samples={"num_inference_steps": 2},
    )  # fmt: skip
    training = make_training(order)
    training.run()
    assert training.step == 4 and training.files.grid.exists()
