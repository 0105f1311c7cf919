"""Speed of the check of cache files, as a ratio to `cat` over the same files in the page cache.

    python tests/bench/verify.py [--files 2000] [--least 30] [--most 300] [--npz 0.25] [--old]
        [--jobs 1 2] [--rounds 5] [--folder FOLDER]

Random files of `least` to `most` KB, safetensors and a share of npz. Each round runs `cat` once,
`verify` in this process, and in so many threads and processes, in turn; printed are medians of
ratios within a round, of wall time and of processor time. `--old` leaves the checksums out, so that
values are searched. Processes are started before the clock, as a job that verifies starts its own
once.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

import torch
from tabulate import tabulate

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from latentmake import digest
from latentmake.files import atomic, cachefile, checksums, npz
from latentmake.files.verified import Expected, verify

RECIPE = digest.canonical({"vae": "v" * 64, "layout": "plain", "format": 3, "dtype": "float32"})
Work = list[tuple[str, Expected]]


def make_files(folder: Path, options: argparse.Namespace) -> Work:
    """Write cache files of random values as a build does."""
    dice, values, work = random.Random(0), torch.randn(options.most << 8), []
    for number in range(options.files):
        stamp = cachefile.stamp(key=f"{number:064}", source="s" * 64, recipe=RECIPE)
        if options.old:
            stamp = {name: stamp[name] for name in stamp.keys() - checksums.PLACEHOLDERS.keys()}
        length = dice.randint(options.least, options.most) << 8
        some = values[:length].roll(number).reshape(4, -1, 64)
        if dice.random() < options.npz:
            path = folder / f"{number}.npz"
            arrays = {"latents": some.numpy(), "crop_ltrb": torch.zeros(4).numpy()}
            atomic.write(path, npz.serialize(arrays, stamp))
        else:
            path = folder / f"{number}.safetensors"
            sizes = {"scaling_factor": "0.13025", "original_width": "64", "original_height": "64"}
            atomic.write(path, cachefile.serialize({"latents": some}, stamp | sizes))
        work.append((str(path), Expected(f"{number:064}")))
    dice.shuffle(work)
    return work


def check(work: Work) -> int:
    """Check files; return their bytes."""
    total = 0
    for path, expected in work:
        found = verify(path, expected)
        assert found.damage is None, (path, found)
        total += found.size
    return total


def timed(run: Callable[[], object]) -> tuple[float, float]:
    """Return seconds of wall time and of processor time, of children that ended too."""
    before, cpu = time.perf_counter(), sum(os.times()[:4])
    run()
    return time.perf_counter() - before, sum(os.times()[:4]) - cpu


def in_pool(pool: Executor, work: Work, jobs: int) -> None:
    """Check files in all workers of a pool, some at a time."""
    size = max(1, min(256, len(work) // (4 * jobs)))
    list(pool.map(check, [work[start : start + size] for start in range(0, len(work), size)]))


def main() -> None:
    """Print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, value in {"files": 2000, "least": 30, "most": 300, "rounds": 5}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--npz", type=float, default=0.25, help="share of npz files")
    parser.add_argument("--old", action="store_true", help="files without checksums")
    parser.add_argument("--jobs", type=int, nargs="*", default=[2])
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        work = make_files(Path(folder), options)
        paths = [path for path, _ in work]
        pools = {f"{jobs} threads": ThreadPoolExecutor(jobs) for jobs in options.jobs}
        pools |= {f"{jobs} processes": ProcessPoolExecutor(jobs) for jobs in options.jobs}
        runs: dict[str, Callable[[], object]] = {
            "cat": lambda: [
                subprocess.run(["cat", *paths[i : i + 5000]], check=True, stdout=subprocess.DEVNULL)
                for i in range(0, len(paths), 5000)
            ],
            "one thread": lambda: check(work),
        }
        for name, pool in pools.items():
            runs[name] = lambda pool=pool, name=name: in_pool(pool, work, int(name.split()[0]))
        for run in runs.values():
            run()
        found = [{name: timed(run) for name, run in runs.items()} for _ in range(options.rounds)]
        total = sum(os.path.getsize(path) for path in paths)
        rows = []
        for name in runs:
            wall = statistics.median(each["cat"][0] / each[name][0] for each in found)
            cpu = statistics.median(each["cat"][1] / max(1e-9, each[name][1]) for each in found)
            rate = total / statistics.median(each[name][0] for each in found) / 1e9
            rows.append(
                (name, f"{rate:.2f}", f"{wall:.2f}", "" if "proc" in name else f"{cpu:.2f}")
            )
        heads = ("", "GB/s", "speed of cat", "by processor time")
        sys.stdout.write(f"{len(paths)} files, {total / 1e6:.0f} MB\n{tabulate(rows, heads)}\n")
        for pool in pools.values():
            pool.shutdown()


if __name__ == "__main__":
    main()
