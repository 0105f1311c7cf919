"""What a large build costs the process that submits its jobs, with an encoder that does nothing.

    python tests/bench/cluster.py [--images 10000 100000] [--items 1024]
        [--profile profiles/slurm]

Generated bitmaps at one resolution with a caption each, through real Snakemake; with a profile,
through its cluster. Printed: jobs submitted; the time until the first of them (plan and graph) and
the whole, each a target; and the most memory that the submitting process held.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from pathlib import Path

import plan as planning
import psutil
from tabulate import tabulate

TARGETS = 2


def build(folder: Path, profile: str | None) -> list[float]:
    """Return jobs submitted, seconds until the first and in all, and most memory in MB."""
    chosen = ["--profile", profile] if profile else ["--cores", "2"]
    command = [sys.executable, "-m", "snakemake", *chosen, "caches_generated"]
    with (folder / "output.txt").open("w") as output:
        began = time.monotonic()
        process = psutil.Popen(command, cwd=folder, stdout=output, stderr=output)
        first = memory = 0.0
        while process.poll() is None:
            time.sleep(0.1)
            try:
                memory = max(memory, process.memory_info().rss / 1e6)
            except psutil.Error:
                break
            if not first and "rule encode_" in (folder / "output.txt").read_text():
                first = time.monotonic() - began
    text = (folder / "output.txt").read_text()
    if process.wait():
        sys.exit(text[-3000:])
    jobs = sum("rule encode_" in line for line in text.splitlines())
    return [jobs, first, time.monotonic() - began, memory]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, nargs="+", default=[10_000, 100_000])
    parser.add_argument("--items", type=int, default=1024, help="items of a job")
    parser.add_argument("--profile", default=None)
    parser.add_argument("--folder", type=Path, default=None, help="where to work")
    options = parser.parse_args()
    rows = []
    for images in options.images:
        folder = Path(tempfile.mkdtemp(prefix="latentmake-bench-", dir=options.folder))
        try:
            job = {"encode": {"gpus": 0, "cpus": 1, "mem_mb": 1500, "runtime": 5}}
            batch = {"items": options.items}
            planning.make_idle_project(folder, images, [64], batch=batch, cluster=job)
            jobs, first, whole, memory = build(folder, options.profile)
            targets = images * TARGETS
            each = [1000 * first / targets, 1000 * whole / targets]
            rows.append([images, targets, jobs, first, each[0], whole, each[1], memory])
            print(tabulate(rows[-1:], tablefmt="plain", floatfmt=".2f"), flush=True)
        finally:
            shutil.rmtree(folder)
    head = ["images", "targets", "jobs", "plan and graph [s]", "[ms a target]"]
    head += ["whole [s]", "[ms a target]", "memory [MB]"]
    print(tabulate(rows, headers=head, floatfmt=".2f"))


if __name__ == "__main__":
    main()
