"""What a cold build costs besides encoding, a target, and how much memory the encoder holds.

    python tests/bench/build.py --model models/tiny-sd [--images 1000 10000] [--folder FOLDER]

Generated images at three resolutions with a caption each, encoded by a real model through real
Snakemake. `outside` is the wall time without any encoding process, a target; `memory` the most
that an encoding process held. The model is the sample's.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path

import psutil
from PIL import Image
from tabulate import tabulate

ROOT = Path(__file__).resolve().parents[2]
TARGETS = 4


def make_project(folder: Path, images: int, model: Path) -> None:
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
                "resolutions": [16, 24, 32],
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


def watch(folder: Path) -> tuple[float, float, float]:
    """Build, and return wall time, the time in which an encoder lived, and its most memory (MB)."""
    began = time.monotonic()
    with (folder / "output.txt").open("w") as output:
        command = [sys.executable, "-m", "snakemake", "--cores", "1", "--quiet", "all"]
        build = psutil.Popen([*command, "--", "caches_generated"], cwd=folder, stderr=output)
        encoding = memory = 0.0
        last = time.monotonic()
        while build.poll() is None:
            time.sleep(0.05)
            now = time.monotonic()
            sizes = [0.0]
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
    return time.monotonic() - began, encoding, memory


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--images", type=int, nargs="+", default=[1000, 10_000])
    parser.add_argument("--folder", type=Path, default=None, help="where to work")
    options = parser.parse_args()
    rows = []
    for images in options.images:
        folder = Path(tempfile.mkdtemp(prefix="latentmake-bench-", dir=options.folder))
        try:
            make_project(folder, images, options.model)
            wall, encoding, memory = watch(folder)
            targets = images * TARGETS
            rows.append([images, targets, wall, (wall - encoding) / targets * 1000, memory])
            made = sum(1 for _ in (folder / "cache").rglob("*.safetensors"))
            if made != targets:
                sys.exit(f"{made} targets were made, not {targets}")
        finally:
            shutil.rmtree(folder)
    head = ["images", "targets", "wall [s]", "outside [ms a target]", "memory [MB]"]
    print(tabulate(rows, headers=head, floatfmt=".2f"))


if __name__ == "__main__":
    main()
