"""What a cold build costs besides encoding, a target, and how much memory its processes hold.

    python tests/bench/build.py [--images 10000 100000] [--resolutions 64] [--folder FOLDER]
    python tests/bench/build.py --model data/tiny-sd [--images 1000 10000]

Generated images with a caption each, through real Snakemake on all cores. The encoder does nothing,
in jobs that are real otherwise (they import torch, read, check and write), or is that of a model.
Printed, a target: the wall time of all, that without any encoding process, and the processor time
of all; and the most memory that the planning process and a job held.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path

import plan as planning
import psutil
from PIL import Image
from tabulate import tabulate

ROOT = Path(__file__).resolve().parents[2]
CORES = len(os.sched_getaffinity(0))


def make_project(folder: Path, images: int, resolutions: list[int], model: Path) -> None:
    """Write a project of pictures in random colours."""
    for name in ("Snakefile", "rules", "scripts", "profiles", "envs"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "models").mkdir()
    (folder / "models/tiny-sd").symlink_to(model.resolve())
    config = {
        "datasets": {"generated": {"path": "data"}},
        "models": {"tiny-sd": {"vae": "models/tiny-sd/vae", "text": "models/tiny-sd/text_encoder"}},
        "runs": {
            "generated": {
                "datasets": "generated",
                "model": "tiny-sd",
                "resolutions": resolutions,
            }
        },
    }
    (folder / "config").mkdir()
    (folder / "config/config.yaml").write_text(json.dumps(config))
    (folder / "data").mkdir()
    dice = random.Random(0)
    for number in range(images):
        image = Image.new("RGB", (48, 40), tuple(dice.randbytes(3)))
        image.putpixel((number % 48, 0), (number % 256, number // 256 % 256, 7))
        image.save(folder / f"data/{number:06d}.png", compress_level=1)
        (folder / f"data/{number:06d}.txt").write_text(f"colour number {number}")


def watch(folder: Path) -> list[float]:
    """Build; return wall time, the time in which an encoder lived, processor time, memory (MB).

    Memory is that of the planning process, then of the job that held most.
    """
    began, before = time.monotonic(), os.times()
    with (folder / "output.txt").open("w") as output:
        command = [sys.executable, "-m", "snakemake", "--cores", str(CORES), "--quiet", "all"]
        build = psutil.Popen([*command, "--", "caches_generated"], cwd=folder, stderr=output)
        encoding = planner = memory = 0.0
        last = time.monotonic()
        while build.poll() is None:
            time.sleep(0.05)
            now = time.monotonic()
            sizes = [0.0]
            with contextlib.suppress(psutil.Error):
                planner = max(planner, build.memory_info().rss / 1e6)
            for child in build.children(recursive=True):
                try:
                    if any(".encode.py" in part for part in child.cmdline()):
                        sizes.append(child.memory_info().rss / 1e6)
                except psutil.Error:
                    continue
            if len(sizes) > 1:
                encoding += now - last
                memory = max(memory, *sizes)
            last = now
    if build.returncode:
        sys.exit((folder / "output.txt").read_text()[-3000:])
    used = sum(os.times()[2:4]) - sum(before[2:4])
    return [time.monotonic() - began, encoding, used, planner, memory]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, help="a folder of diffusers; else nothing is encoded")
    parser.add_argument("--images", type=int, nargs="+", default=[10_000, 100_000])
    parser.add_argument("--resolutions", type=int, nargs="+", default=[64])
    parser.add_argument("--folder", type=Path, default=None, help="where to work")
    options = parser.parse_args()
    rows = []
    for images in options.images:
        folder = Path(tempfile.mkdtemp(prefix="latentmake-bench-", dir=options.folder))
        try:
            if options.model:
                make_project(folder, images, options.resolutions, options.model)
            else:
                planning.make_idle_project(folder, images, options.resolutions)
            wall, encoding, used, *memory = watch(folder)
            targets = images * (len(options.resolutions) + 1)
            each = [1000 * value / targets for value in (wall, wall - encoding, used)]
            rows.append([images, targets, wall, *each, *memory])
            print(tabulate(rows[-1:], tablefmt="plain", floatfmt=".2f"), flush=True)
            made = sum(1 for _ in (folder / "cache").rglob("*.safetensors"))
            if made != targets:
                sys.exit(f"{made} targets were made, not {targets}")
        finally:
            shutil.rmtree(folder)
    head = ["images", "targets", "wall [s]", "ms a target", "without jobs", "processor time"]
    head += ["planner [MB]", "job [MB]"]
    print("\n" + tabulate(rows, headers=head, floatfmt=".2f"))


if __name__ == "__main__":
    main()
