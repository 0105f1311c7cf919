"""Estimates of trainings of Wan's network: memory and disk, and what a step really takes."""

from __future__ import annotations

import json
import struct
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import wan_trainer_world
from diffusers import WanTransformer3DModel
from dit_world import tiny_dit
from latentmake.config.root import parse
from latentmake.runs.order import Record
from latentmake.trainers.lora import add_adapter
from latentmake.trainers.wan.dit import check_targets, read_dit, shapes_of
from latentmake.trainers.wan.estimate import estimate_training, largest_latent, training_memory
from latentmake.trainers.wan.recipe import load_transformer, write_lora
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from wan_trainer_world import configuration, make_order, make_training

pytestmark = pytest.mark.usefixtures("own_folder")

# The network of 1.3B weights; settings that are not named are those of 14B.
SMALL = {"num_attention_heads": 12, "ffn_dim": 8960, "num_layers": 30}
LATENT = (3, 16, 24)
USUAL = ["to_q", "to_k", "to_v", "to_out.0"]
OUTER, ALL = [*USUAL, "proj_out"], [*USUAL, "ffn.net.0.proj", "ffn.net.2"]


def config(dit: str, second: str | None = None, **trainer: Any) -> Any:
    task = "t2v-A14B" if second else "t2v-1.3B"
    model = {"task": task, "dit": dit, "dit_high_noise": second}
    dataset = {"target_frames": [33, 81], "fit": "crop"}
    sizes = [[416, 240], [832, 480]]
    return parse(configuration(model, trainer, dataset, resolutions=sizes))


def write_header(path: Path, **sizes: int) -> None:
    """Write a file of weights in bfloat16 whose numbers are a hole."""
    header: dict[str, Any] = {}
    end = 0
    with torch.device("meta"):
        network: Any = WanTransformer3DModel(**sizes)
    for name, value in network.state_dict().items():
        start, end = end, end + 2 * value.numel()
        header[name] = {"dtype": "BF16", "shape": [*value.shape], "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)


def test_of_the_real_network_and_81_frames(tmp_path: Path) -> None:
    write_header(tmp_path / "dit.safetensors", **SMALL)
    settings = config("dit.safetensors", max_steps=50)
    assert largest_latent(settings, settings.runs["r"]) == (21, 60, 104)
    memory, need, note = estimate_training(settings, "r", settings.models["m"])
    assert sum(memory.values()) == pytest.approx(10.8e9, rel=0.05)
    assert memory["weights"] == pytest.approx(2.84e9, rel=0.02)
    assert note.startswith("about 10.8 GB of GPU memory (weights 2.8 GB, LoRA ")
    assert note.endswith(" GB of disk")
    larger = config("dit.safetensors", gradient_checkpointing=False, rank=64)
    more, other, _ = estimate_training(larger, "r", larger.models["m"])
    assert more["activations"] > 8 * memory["activations"]
    assert other.size == 2 * need.size


def test_of_two_networks_the_one_in_use_is_on_the_device(tmp_path: Path) -> None:
    write_header(tmp_path / "dit.safetensors")
    settings = config("dit.safetensors", "dit.safetensors", rank=32)
    memory, *_ = estimate_training(settings, "r", settings.models["m"])
    assert memory["weights"] == pytest.approx(28.6e9, rel=0.01)
    assert sum(memory.values()) == pytest.approx(57.7e9, rel=0.01)


def test_time_is_that_of_the_last_training(tmp_path: Path) -> None:
    write_header(tmp_path / "dit.safetensors", **SMALL)
    settings = config("dit.safetensors", steps=600)
    record = Record(parts={"dataset": "d"}, steps=10, seconds=42.0, loss_start=1, loss_end=1)
    record.write(tmp_path / "runs/r/training.json")
    *_, note = estimate_training(settings, "r", settings.models["m"])
    assert note.endswith("; 42 min at 4.2 s a step, as in the last training")
    (tmp_path / "runs/r/training.json").write_text("{")
    assert estimate_training(settings, "r", settings.models["m"])[-1].endswith("of disk")


def test_disk_is_that_of_the_files(tmp_path: Path) -> None:
    tiny_dit(head=128).save_pretrained("dit")
    settings = config("dit", checkpoints_total_limit=1, save_every_n_steps=250, steps=1000)
    network = load_transformer("dit")
    targets = settings.runs["r"].trainer.target_modules
    add_adapter(network, rank=32, alpha=32, target_modules=targets)
    write_lora(network, tmp_path / "lora")
    results = sum(file.stat().st_size for file in (tmp_path / "lora").iterdir())
    weights = [each for each in network.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(weights)
    sum(weight.sum() for weight in weights).backward()
    optimizer.step()
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    checkpoint = 4 * sum(map(torch.Tensor.numel, weights)) + (tmp_path / "state.pt").stat().st_size
    _, need, _ = estimate_training(settings, "r", settings.models["m"])
    assert need.size == pytest.approx(5 * results + 2 * checkpoint, rel=0.05)


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


@pytest.mark.parametrize(
    "changes",
    [{}, {"lora_dropout": 0.5, "target_modules": OUTER}, {"rank": 32, "target_modules": ALL}],
    ids=["usual", "outer", "feed-forward"],
)
@pytest.mark.parametrize("gradient_checkpointing", [True, False])
def test_a_step_takes_the_memory_that_was_told(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    gradient_checkpointing: bool,
    changes: dict[str, Any],
) -> None:
    monkeypatch.setattr(wan_trainer_world, "SHAPES", {"image": LATENT, "clip": LATENT})
    dit = tiny_dit(heads=2, head=128, num_layers=4, ffn_dim=1024)
    dit.to(torch.bfloat16).save_pretrained(tmp_path / "dit")
    order = make_order(
        tmp_path,
        mixed_precision="bf16",
        gradient_checkpointing=gradient_checkpointing,
        steps=2,
        dataloader_num_workers=0,
        **{"rank": 8, **changes},
    )
    with Living() as living:
        training = make_training(order)
        network = training.learner.denoiser
        for parameter in network.parameters():
            living.add(parameter)
        batches = (training.caches.batch(each) for each in training.batch_order.batches(0, 1, 2))
        for step in (1, 2):
            living.peak = living.bytes
            training._one_step(step, batches)()
    frozen = [each for each in network.parameters() if not each.requires_grad]
    assert all(each.grad is None for each in frozen)
    assert {each.dtype for each in frozen} == {torch.bfloat16, torch.float32}
    tensors, settings = read_dit(str(tmp_path / "dit"))
    shapes = shapes_of(tensors)
    layers = check_targets(order.trainer.target_modules, shapes, "targets")
    told = training_memory(shapes, settings, layers, LATENT, order.trainer)
    assert living.peak == pytest.approx(sum(told.values()), rel=0.1)
