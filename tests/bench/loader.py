"""Speed of the trainer's loader, as ratios to reading the same files with safetensors alone.

    python tests/bench/loader.py [--items 20000] [--threads 1 2] [--batch-size 1 8 64]
        [--rounds 3] [--folder FOLDER]

Generated items of 4 x 64 x 64 latents and one embedding of 77 x 768, in float32, two files each, in
the page cache (as far as memory goes). The bare loop opens each item's two files by safetensors'
load_file in the very order of the batches, and drops what it returns. Printed: medians of rounds in
which the loops take turns; the loader's rate as a ratio to the bare loop's, and its processor time,
which other work on the machine disturbs less. `start-up` is the time of Caches, which reads all
headers, in seconds per 100,000 items. Memory that is touched for the first time costs several times
the reading itself, so that few items with large batches (a hundred batches or less) tell little of
a training.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from safetensors.torch import load_file
from tabulate import tabulate

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from latentmake.config.trainers import SdTrainer
from latentmake.formats import cachefile
from latentmake.runs.rows import Row
from latentmake.trainers.loop.caches import PLAIN, Caches
from latentmake.trainers.loop.recipe import BatchOrder

LATENTS = {"scaling_factor": "0.18215", "pixel_width": "512", "pixel_height": "512"}


def make_items(folder: Path, count: int) -> list[Row]:
    """Write cache files as a build does, with random values."""
    dice = random.Random(0)
    values = torch.randn(1 << 22)

    def some(*shape: int) -> torch.Tensor:
        size = torch.Size(shape).numel()
        start = dice.randrange(len(values) - size)
        return values[start : start + size].view(shape).clone()

    items = []
    for number in range(count):
        stamp = cachefile.stamp(key=f"{number:064}", source="s" * 64, recipe={"vae": "v" * 400})
        latents, embedding = folder / f"{number}.latents", folder / f"{number}.text"
        latents.write_bytes(cachefile.serialize({"latents": some(4, 64, 64)}, LATENTS | stamp))
        tensors = {next(iter(PLAIN.text)): some(77, 768), "text_encoder.pooled": some(768)}
        embedding.write_bytes(cachefile.serialize(tensors, {"caption": "a cat"} | stamp))
        paths = {"512": str(latents)}
        items.append(
            Row(dataset="d", stem=str(number), source="s", latents=paths, text=str(embedding))
        )
    return items


def by_load_file(caches: Caches, batches: list) -> None:
    """Read every file whole."""
    for batch in batches:
        for index in batch:
            load_file(caches.examples[index].latents.path)
            load_file(caches.examples[index].text.path)


def by_loader(caches: Caches, batches: list, *, threads: int) -> None:
    """Take all batches from the loader and drop them."""
    count = sum(len(batch.indices) for batch in caches.prefetched(batches, threads=threads))
    assert count == len(caches)


def measure(loop: Callable[[Caches, list], None], caches: Caches, batches: list) -> list[float]:
    """Return the time of a loop, and its processor time, in seconds."""
    began, used = time.perf_counter(), sum(os.times()[:4])
    loop(caches, batches)
    return [time.perf_counter() - began, sum(os.times()[:4]) - used]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--items", type=int, default=20_000)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--batch-size", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=None, help="where to work")
    options = parser.parse_args()
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp(prefix="latentmake-bench-", dir=options.folder))
    loops = {0: by_load_file, **{n: partial(by_loader, threads=n) for n in options.threads}}
    try:
        items = make_items(folder, options.items)
        began = time.perf_counter()
        caches = Caches(items)
        start_up = (time.perf_counter() - began) / options.items * 100_000
        rows = []
        for size in options.batch_size:
            schedule = BatchOrder(caches, SdTrainer(kind="sd", train_batch_size=size))
            batches = list(schedule.batches(0, 1, schedule.batches_per_epoch))
            rounds = [
                {number: measure(loop, caches, batches) for number, loop in loops.items()}
                for _ in range(options.rounds)
            ]
            found = {
                number: [
                    statistics.median(each[number][clock] for each in rounds) for clock in (0, 1)
                ]
                for number in loops
            }
            (bare, used), *_ = found.values()
            rows += [  # os.times counts in hundredths of a second
                [size, number, bare / found[number][0], found[number][1] / max(used, 0.01)]
                for number in options.threads
            ]
        head = ["batch", "threads", "rate / load_file", "processor time"]
        print(tabulate(rows, headers=head, floatfmt=".2f"))
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
        print(f"start-up: {start_up:.1f} s per 100,000 items; most memory held: {most:.0f} MB")
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
