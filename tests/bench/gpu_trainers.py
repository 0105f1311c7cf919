"""Speed of the trainer `sd` on a GPU, at Stable Diffusion 1.5's size, as a ratio to a bare loop.

    python tests/bench/gpu_trainers.py [--ways NAME...] [--cpu] [--json FILE]

A LoRA of rank 16 in bfloat16, batches of 8 at 64 x 64 latents, read from disk at each step. The
bare loop does the same forward, backward, clipping and optimizer's step with one batch that lies in
memory. `--ways adamw adamw8bit compile` says with what. gpu.sh runs it, and `wan.py` for
the trainer `wan`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))

import gpu_world as world
from accelerate.state import AcceleratorState
from latentmake.base.errors import UserError, first_line
from latentmake.trainers.loop.caches import Caches, read_items
from latentmake.trainers.loop.train import Training
from latentmake.trainers.sd.recipe import SdRecipe
from trainer_world import make_latents, make_order, make_text, make_unet

Row = dict[str, object]
ITEMS = 64
SD_UNET = {
    "sample_size": 64,
    "layers_per_block": 2,
    "block_out_channels": (320, 640, 1280, 1280),
    "down_block_types": (*("CrossAttnDownBlock2D",) * 3, "DownBlock2D"),
    "up_block_types": ("UpBlock2D", *("CrossAttnUpBlock2D",) * 3),
    "cross_attention_dim": 768,
    "norm_num_groups": 32,
}
"""The UNet of Stable Diffusion 1.5 (source: its unet/config.json)."""
WAYS: dict[str, dict[str, object]] = {
    "adamw": {},
    "adamw8bit": {"optimizer": "adamw8bit"},
    "compile": {"torch_compile": True},
}


def make_files(folder: Path, device: torch.device, *, tiny: bool) -> None:
    """Write the UNet, caches and their manifest."""
    side, width = (8, 16) if tiny else (64, 768)
    lines = [
        {
            "dataset": "generated",
            "stem": str(number),
            "source": f"{number}.png",
            "latents": {
                "a": make_latents(folder / f"cache/{number}.safetensors", side, side, number)
            },
            "text": make_text(folder / f"cache/{number}.text", number, tokens=77, width=width),
        }
        for number in range(ITEMS)
    ]
    (folder / "manifest.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "dataset.lock").write_text(json.dumps({"digest": "d" * 64}))
    with device:  # in seconds there, in a minute on a CPU
        make_unet(folder / "unet", **({} if tiny else SD_UNET))


def make_training(folder: Path, steps: int, *, cpu: bool, **settings: object) -> Training:
    """Return a training that does nothing but steps."""
    order = make_order(
        folder,
        rank=16,
        steps=steps,
        train_batch_size=2 if cpu else 8,
        checkpointing_steps=steps + 1,
        dataloader_num_workers=2,
        mixed_precision="no" if cpu else "bf16",
        target_modules=["to_q", "to_k", "to_v", "to_out.0"],
        **settings,
    )
    training = Training(SdRecipe(order))
    training.caches = Caches(read_items(Path(order.manifest)))
    return training


def by_trainer(training: Training) -> None:
    """Make all steps as a training does."""
    training.step = 0
    training._steps(frozenset())


def by_bare_loop(training: Training) -> None:
    """Make as many steps, with nothing that a step does not need."""
    batch = training.caches.batch(range(training.settings.train_batch_size))
    learner, random = training.learner, torch.Generator().manual_seed(0)
    for _ in range(training.steps):
        noise, timesteps = training.objective.draw(batch.latents.shape, random)
        _, losses = training.painter.losses(learner.network, batch, noise, timesteps)
        training.accelerator.backward(losses.mean())
        learner.clip()
        learner.step()


def measure(loop: Callable[[Training], None], training: Training) -> float:
    """Return the seconds of a step."""
    began = time.perf_counter()
    loop(training)
    if training.accelerator.device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - began) / training.steps


def rows(ways: list[str], cpu: bool, device: torch.device, folder: Path) -> Iterator[Row]:
    """Yield a row of each way to train."""
    make_files(folder, device, tiny=cpu)
    for name in ways:
        settings = WAYS[name]
        AcceleratorState._reset_state(reset_partial_state=True)
        compiled = "INDUCTOR" if settings.get("torch_compile") else "NO"
        os.environ["ACCELERATE_DYNAMO_BACKEND"] = compiled  # as `accelerate launch` does
        row: Row = {"trainer": "sd", "way": name}
        try:
            training = make_training(folder, 3 if cpu else 20, cpu=cpu, **settings)
            began = time.perf_counter()
            by_trainer(training)  # all is warm
            row["first steps [s]"] = time.perf_counter() - began
            by_bare_loop(training)
            pairs = [
                (measure(by_bare_loop, training), measure(by_trainer, training))
                for _ in range(1 if cpu else 3)
            ]
        except UserError as error:  # no bitsandbytes
            yield row | {"fault": first_line(error)}
            continue
        row["a step [ms]"] = 1000 * statistics.median(ours for _, ours in pairs)
        row["trainer / bare loop"] = statistics.median(bare / ours for bare, ours in pairs)
        if device.type == "cuda":
            row["peak [GB]"] = torch.cuda.max_memory_allocated() / 1e9
            torch.cuda.reset_peak_memory_stats()
        yield row
        del training
        world.free_memory()


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="Measure the trainer `sd`.")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=["adamw", "adamw8bit"])
    parser.add_argument("--cpu", action="store_true", help="tiny sizes on the CPU")
    parser.add_argument("--json", type=Path, help="write the rows there, too")
    options = parser.parse_args()
    path = options.json and options.json.absolute()
    device = torch.device("cpu" if options.cpu else "cuda")
    if options.cpu:
        os.environ["ACCELERATE_USE_CPU"] = "true"
    with world.folder() as folder:
        world.tell(rows(options.ways, options.cpu, device, folder), path)


if __name__ == "__main__":
    main()
