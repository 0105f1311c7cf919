"""Speed of the trainer `sd`, as a ratio to a bare loop that does the same work.

    python tests/bench/steps.py [--widths 16 32 64] [--side 16] [--steps 40] [--rounds 5]
        [--threads 1] [--batch-size 4] [--profile FILE]

A tiny UNet on the CPU with one thread, and caches that are read from disk at each step. The bare
loop draws noise and timesteps and does forward, backward, clipping and the optimizer's step, on the
same network, with a batch of the same size that lies in memory. The trainer's loop is the one of a
training, with scalars and progress, without samples and checkpoints. The two take turns. Printed:
the median of a bare step in milliseconds, and of the ratios of the trainer's steps per second to
the bare loop's beside it: first in time, then in processor time of this process, which other work
on the machine does not disturb.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from tabulate import tabulate

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "tests/worlds")]

from latentmake.trainers.loop import train  # noqa: E402
from latentmake.trainers.loop.caches import Caches, read_items  # noqa: E402
from latentmake.trainers.sd.recipe import SdRecipe  # noqa: E402
from trainer_world import make_latents, make_order, make_text, make_unet  # noqa: E402

ITEMS = 64


def make_training(folder: Path, options: argparse.Namespace, width: int) -> train.Training:
    """Make a training that does nothing but steps, and reads its caches at each."""
    lines = []
    for number in range(ITEMS):
        latents = folder / f"cache/{number}.latents.safetensors"
        text = folder / f"cache/{number}.text.safetensors"
        lines.append(
            {
                "dataset": "generated",
                "stem": str(number),
                "source": f"{number}.png",
                "latents": {"a": make_latents(latents, options.side, options.side, number)},
                "text": make_text(text, number, tokens=77),
            }
        )
    (folder / "manifest.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "dataset.lock").write_text(json.dumps({"digest": "d" * 64}))
    make_unet(folder / "unet", block_out_channels=(width, 2 * width))
    order = make_order(
        folder,
        adapter="full",
        steps=options.steps,
        train_batch_size=options.batch_size,
        checkpointing_steps=options.steps + 1,
        dataloader_num_workers=options.threads,
        learning_rate=1e-6,
    )
    training = train.Training(SdRecipe(order))
    training.caches = Caches(read_items(Path(order.manifest)))
    return training


def by_trainer(training: train.Training) -> None:
    """Make all steps as a training does."""
    training.step = 0
    training._steps(frozenset())


def by_bare_loop(training: train.Training) -> None:
    """Make as many steps, with nothing that a step does not need."""
    batch = training.caches.batch(range(training.settings.train_batch_size))
    learner, cpu = training.learner, torch.device("cpu")
    optimizer = learner.optimizer.optimizer
    random = torch.Generator().manual_seed(0)
    for _ in range(training.steps):
        noise, timesteps = training.objective.draw(batch.latents.shape, random)
        _, losses = training.objective.losses(
            learner.denoiser, batch, noise, timesteps, device=cpu, dtype=torch.float32
        )
        losses.mean().backward()
        torch.nn.utils.clip_grad_norm_(learner.parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def measure(
    loop: Callable[[train.Training], None], training: train.Training
) -> tuple[float, float]:
    """Return the milliseconds of a step, in time and in processor time."""
    began, used = time.perf_counter(), time.process_time()
    loop(training)
    seconds = time.perf_counter() - began, time.process_time() - used
    return 1000 * seconds[0] / training.steps, 1000 * seconds[1] / training.steps


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--widths", type=int, nargs="+", default=[16, 32, 64], help="of the UNet")
    parser.add_argument("--side", type=int, default=16, help="of the latents")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--profile", type=Path, help="write a profile of the trainer's loop there")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for width in options.widths:
        with tempfile.TemporaryDirectory(prefix="latentmake-bench-") as name:
            training = make_training(Path(name), options, width)
            measure(by_trainer, training)  # all is warm
            measure(by_bare_loop, training)
            pairs = [
                (measure(by_bare_loop, training), measure(by_trainer, training))
                for _ in range(options.rounds)
            ]
            if options.profile:
                profile = cProfile.Profile()
                profile.runcall(by_trainer, training)
                profile.dump_stats(options.profile)
            step = statistics.median(bare for (bare, _), _ in pairs)
            ratios = [
                statistics.median(bare[clock] / trainer[clock] for bare, trainer in pairs)
                for clock in (0, 1)
            ]
            rows.append([width, step, *ratios])
    head = ["width", "a bare step [ms]", "trainer / bare loop", "in processor time"]
    print(tabulate(rows, headers=head, floatfmt=".2f"))


if __name__ == "__main__":
    main()
