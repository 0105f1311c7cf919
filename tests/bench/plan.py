"""Processor time of planning, as ratios to a Snakemake run that does nothing, measured beside it.

    python tests/bench/plan.py [--images 1000 10000 100000] [--folder FOLDER]

For each size: `cold`, a dry run with every target missing; `nothing`, the command again when all
is built; `edited`, a dry run after one caption changed; `status`, `latentmake status` then; all
with three resolutions and a caption an image. `memory` is that of the process, at most. The caches
are made by the project's own code with an encoder that does nothing.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

os.environ["TQDM_DISABLE"] = "1"
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # a run that compiles all modules tells nothing

from tabulate import tabulate

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

from latentmake.config.root import parse  # noqa: E402
from latentmake.data.memo import MEMO, Memo  # noqa: E402
from latentmake.plan.facts import Facts  # noqa: E402
from latentmake.plan.planner import make_plan  # noqa: E402

CONFIG = {
    "datasets": {"generated": {"path": "data/generated"}},
    "models": {"nothing": {"vae": "models/vae", "text": "models/text_encoder"}},
    "runs": {
        "generated": {
            "datasets": ["generated"],
            "model": "nothing",
            "resolutions": [64, 96, 128],
        }
    },
}
TARGETS = 4


def make_project(folder: Path, images: int) -> None:
    """Write a project whose images differ in a few bytes and whose model holds no weights."""
    for name in ("Snakefile", "rules", "scripts", "profiles", "envs"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "config").mkdir()
    (folder / "config/config.yaml").write_text(json.dumps(CONFIG))
    for part, values in (
        ("vae", {"block_out_channels": [1, 1, 1, 1]}),
        ("text_encoder", {"model_type": "clip_text_model"}),
        ("tokenizer", None),
    ):
        place = folder / "models" / part
        place.mkdir(parents=True)
        (place / ("config.json" if values else "tokenizer.json")).write_text(json.dumps(values))
        (place / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    data = folder / "data/generated"
    data.mkdir(parents=True)
    # A 4 x 4 bitmap of 24 bits a pixel; its pixels are the image's number.
    header = b"BM" + (102).to_bytes(4, "little") + bytes(4) + (54).to_bytes(4, "little")
    header += (40).to_bytes(4, "little") + (4).to_bytes(4, "little") * 2
    header += (1).to_bytes(2, "little") + (24).to_bytes(2, "little") + bytes(24)
    for number in range(images):
        pixels = number.to_bytes(4, "little") * 12
        (data / f"{number:06d}.bmp").write_bytes(header + pixels)
        (data / f"{number:06d}.txt").write_text(f"number {number}")


def build(folder: Path) -> None:
    """Make every cache file."""
    # With torch in a process of its own: what a process has used counts in those that it starts.
    import torch
    from latentmake.encode.reading import Loaded, Sample
    from latentmake.encode.runner import carry_out

    def nothing(samples: list[Sample]) -> list[tuple[dict[str, torch.Tensor], dict[str, str]]]:
        return [({"latents": torch.ones(4, 8, 8)}, {}) for _ in samples]

    os.chdir(folder)
    with Memo(MEMO) as memo:
        plan = make_plan(Facts(parse(CONFIG), memo), ["generated"])
    for order in plan.orders:
        carry_out([order], say=lambda _: None, load=lambda _: Loaded(nothing, 1))


class Cost(NamedTuple):
    """Cost of a command: processor time in seconds, and peak memory in MB."""

    seconds: float
    memory: float


def cost(
    folder: Path,
    *arguments: str,
    times: int = 3,
    expect: str = "",
    word: bool = False,
    anew: bool = False,
) -> Cost:
    """Return the median cost of a command of Snakemake, or of `latentmake`.

    `anew`: each time without what it wrote before.
    """
    program = ["latentmake"] if word else ["snakemake", "--cores", "1"]
    found = []
    for _ in range(times):
        for written in (".latentmake", ".snakemake") if anew else ():
            shutil.rmtree(folder / written, ignore_errors=True)
        with tempfile.TemporaryFile("w+") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", *program, *arguments],
                cwd=folder,
                env={**os.environ, "PYTHONPATH": str(ROOT / "scripts")},
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            _, status, used = os.wait4(process.pid, 0)
            output.seek(0)
            said = output.read()
        if status or expect not in said:
            sys.exit(f"{arguments} failed:\n{said[-3000:]}")
        found.append(Cost(used.ru_utime + used.ru_stime, used.ru_maxrss / 1024))
    return Cost(*map(statistics.median, zip(*found, strict=True)))


def bare(folder: Path) -> float:
    """Return the processor time that Snakemake takes to do nothing, in seconds."""
    (folder / "Snakefile").write_text('rule all:\n    input: "there.txt"\n')
    (folder / "there.txt").write_text("")
    return cost(folder, times=5, expect="Nothing to be done").seconds


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, nargs="+", default=[1000, 10_000, 100_000])
    parser.add_argument("--folder", type=Path, default=None, help="where to work")
    options = parser.parse_args()
    rows = []
    for images in options.images:
        folder = Path(tempfile.mkdtemp(prefix="latentmake-bench-", dir=options.folder))
        try:
            (folder / "bare").mkdir()
            project = folder / "project"
            project.mkdir()
            make_project(project, images)
            unit = bare(folder / "bare")
            cold = cost(project, "-n", "--quiet", "all", "--", "caches_generated", anew=True)
            child = multiprocessing.get_context("spawn").Process(target=build, args=(project,))
            child.start()
            child.join()
            cost(project, "caches_generated", times=1)
            again = cost(project, "caches_generated", expect="Nothing to be done")
            unit = statistics.median([unit, bare(folder / "bare")])
            (project / "data/generated/000000.txt").write_text("another number")
            edited = cost(project, "-n", "--quiet", "all", "--", "caches_generated", times=1)
            status = cost(project, "status", word=True)
            found = [cold, again, edited, status]
            figures = [f"{each.seconds / unit:.2f} ({each.memory:.0f})" for each in found]
            rows.append([images, images * TARGETS, unit, *figures])
            print(tabulate(rows[-1:], tablefmt="plain"), flush=True)
        finally:
            shutil.rmtree(folder)
    print()
    ratios = [f"{each} / bare (memory [MB])" for each in ("cold", "nothing", "edited", "status")]
    head = ["images", "targets", "bare [s]", *ratios]
    print(tabulate(rows, headers=head, floatfmt=".2f"))


if __name__ == "__main__":
    main()
