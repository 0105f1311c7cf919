"""Speed of the trainer's loader, as ratios to reading the same files with safetensors alone.

    python tests/bench/loader.py [--items 20000] [--threads 1 2] [--batch-size 1 8 64]
        [--dtype float32] [--text 77x768] [--rounds 3] [--folder FOLDER]

Generated items of 4 x 64 x 64 latents and one embedding, two files each, in the page cache (as far
as memory goes). The bare loops open each item's two files in the very order of the batches and drop
what they return: `load_file` by safetensors.torch.load_file, `get_tensor` by safe_open, of the two
tensors that a training needs; both only map the files and need not look at all of their bytes, as
`clone` does, which copies what get_tensor returns. Printed: medians of rounds in which all of these
take turns; the loader's rates as ratios to each bare loop's, and its processor time as a ratio to
that of `load_file`, which other work on the machine disturbs less. `start-up` is the time of
Caches, which reads all headers, in seconds per 100,000 items. Memory that is touched for the first
time costs several times the reading itself, so that few items with large batches (a hundred batches
or less) tell little of a training.

`--text 16..256x4096` draws a length for each embedding, `--dtype mixed` has float32 and bfloat16
items in the same batch.
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
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from tabulate import tabulate

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from latentmake.files import cachefile
from latentmake.plan.manifest import Row
from latentmake.training.loop.caches import PLAIN, Caches
from latentmake.training.loop.recipe import BatchOrder

HIDDEN_STATE = PLAIN.text.name
LATENTS = {"scaling_factor": "0.18215", "shift_factor": "0.0", "pixel_width": "512"}


def processor_time() -> float:
    """Return the seconds of processor time that this process and its ended children have had."""
    return sum(os.times()[:4])


def make_items(folder: Path, count: int, dtype: str, text: str) -> list[Row]:
    """Write cache files as a build does, with random values."""
    dice = random.Random(0)
    lengths, width = text.split("x")
    shortest, _, longest = lengths.partition("..")
    values = torch.randn(1 << 22)
    items = []
    for number in range(count):
        name = dtype if dtype != "mixed" else ("float32", "bfloat16")[number % 2]
        stamp = cachefile.stamp(key=f"{number:064}", source="s" * 64, recipe={"vae": "v" * 400})
        tokens = dice.randint(int(shortest), int(longest or shortest))

        def some(*shape: int, name: str = name) -> torch.Tensor:
            size = torch.Size(shape).numel()
            start = dice.randrange(len(values) - size)
            return values[start : start + size].view(shape).to(getattr(torch, name), copy=True)

        latents, embedding = folder / f"{number}.latents", folder / f"{number}.text"
        latents.write_bytes(cachefile.serialize({"latents": some(4, 64, 64)}, LATENTS | stamp))
        tensors = {HIDDEN_STATE: some(tokens, int(width))}
        if tokens == 77:
            tensors["text_encoder.pooled"] = some(int(width))
        embedding.write_bytes(cachefile.serialize(tensors, {"caption": "a cat"} | stamp))
        paths = {"512": str(latents)}
        items.append(
            Row(dataset="d", stem=str(number), source="s", latents=paths, text=str(embedding))
        )
    return items


def by_load_file(caches: Caches, batches: list[list[int]]) -> None:
    """Read every file whole."""
    for batch in batches:
        for index in batch:
            load_file(caches.examples[index].latents.path)
            load_file(caches.examples[index].text.path)


def by_get_tensor(caches: Caches, batches: list[list[int]], *, copy: bool = False) -> None:
    """Read the tensors that a training needs."""
    for batch in batches:
        for index in batch:
            example = caches.examples[index]
            for stored in (example.latents, example.text):
                with safe_open(stored.path, framework="pt") as file:
                    tensor = file.get_tensor(stored.found[0][0])
                    if copy:
                        tensor.clone()


def by_clone(caches: Caches, batches: list[list[int]]) -> None:
    """Read them and copy them out of the file's mapping."""
    by_get_tensor(caches, batches, copy=True)


def by_loader(threads: int) -> Callable[[Caches, list], None]:
    """Return what takes all batches from the loader and drops them."""

    def read(caches: Caches, batches: list[list[int]]) -> None:
        count = sum(len(batch.indices) for batch in caches.prefetched(batches, threads=threads))
        assert count == len(caches)

    return read


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--items", type=int, default=20_000)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--batch-size", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--dtype", default="float32", help="float32, bfloat16, float16 or mixed")
    parser.add_argument("--text", default="77x768", help="tokens x width, or fewest..most x width")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=None, help="where to work")
    options = parser.parse_args()
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp(prefix="latentmake-bench-", dir=options.folder))
    try:
        items = make_items(folder, options.items, options.dtype, options.text)
        began = time.perf_counter()
        caches = Caches(items)
        start_up = (time.perf_counter() - began) / options.items * 100_000
        size = sum(path.stat().st_size for path in folder.iterdir())
        rows = []
        for batch_size in options.batch_size:
            count = len(items)
            shapes, repeats = [(4, 64, 64)] * count, [1] * count
            schedule = BatchOrder(shapes, repeats, batch_size=batch_size, seed=0)
            batches = list(schedule.batches(0, 1, schedule.batches_per_epoch))
            loops: dict[str, Callable[[Caches, list[list[int]]], None]] = {
                "load_file": by_load_file,
                "get_tensor": by_get_tensor,
                "clone": by_clone,
            }
            for threads in options.threads:
                loops[f"{threads} threads"] = by_loader(threads)
            rates: dict[str, list[float]] = {name: [] for name in loops}
            costs: dict[str, list[float]] = {name: [] for name in loops}
            for _ in range(options.rounds):
                for name, loop in loops.items():
                    began, used = time.perf_counter(), processor_time()
                    loop(caches, batches)
                    rates[name].append(count / (time.perf_counter() - began))
                    costs[name].append(processor_time() - used)
            found = {name: statistics.median(values) for name, values in rates.items()}
            for threads in options.threads:
                mine = found[f"{threads} threads"]
                ratios = [mine / found[name] for name in ("load_file", "get_tensor", "clone")]
                cost = statistics.median(costs[f"{threads} threads"])
                # os.times counts in hundredths of a second
                ratios.append(cost / max(statistics.median(costs["load_file"]), 0.01))
                rows.append([batch_size, threads, *ratios])
        head = ["batch", "threads", "rate / load_file", "/ get_tensor", "/ clone", "processor time"]
        print(f"{options.items} items, {options.dtype}, text {options.text}, {size / 1e9:.1f} GB")
        print(tabulate(rows, headers=head, floatfmt=".2f"))
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
        print(f"start-up: {start_up:.1f} s per 100,000 items; most memory held: {most:.0f} MB")
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
