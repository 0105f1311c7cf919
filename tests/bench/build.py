"""What a cold build costs besides encoding, a target, and how much memory its processes hold.

    python tests/bench/build.py [--images 10000 100000] [--items 1024] [--folder FOLDER]
        [--profile profiles/slurm]

Generated bitmaps at one resolution with a caption each, through real Snakemake on all cores, or
through the cluster of a profile. The encoder does nothing, in jobs that are real otherwise: they
import torch, read, check and write. Printed: jobs; the time until the first of them (plan and
graph); wall and processor time a target; and the most memory that the planning process and a job
held, of jobs on this machine.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

import plan as planning
import psutil
from tabulate import tabulate

TARGETS = 2
JOB = {"encode": {"gpus": 0, "cpus": 1, "mem_mb": 1500, "runtime": 5}}  # of a cluster


def build(folder: Path, profile: str | None) -> list[float]:
    """Return jobs, seconds until the first, wall and processor time, and memory in MB."""
    chosen = ["--profile", profile] if profile else ["--cores", str(len(os.sched_getaffinity(0)))]
    command = [sys.executable, "-m", "snakemake", *chosen, "caches_generated"]
    said = folder / "output.txt"
    began, before = time.monotonic(), os.times()
    first = planner = job = 0.0
    with said.open("w") as output:
        process = psutil.Popen(command, cwd=folder, stdout=output, stderr=output)
        while process.poll() is None:
            time.sleep(0.05)
            with contextlib.suppress(psutil.Error):
                planner = max(planner, process.memory_info().rss / 1e6)
            for child in process.children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    if any(".encode.py" in part for part in child.cmdline()):
                        job = max(job, child.memory_info().rss / 1e6)
            if not first and "rule encode_" in said.read_text():
                first = time.monotonic() - began
    if process.returncode:
        sys.exit(said.read_text()[-3000:])
    jobs = said.read_text().count("rule encode_")
    used = sum(os.times()[2:4]) - sum(before[2:4])
    return [jobs, first, time.monotonic() - began, used, planner, job]


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
            batch = {"items": options.items}
            planning.make_idle_project(folder, images, [64], batch=batch, cluster=JOB)
            jobs, first, wall, used, *memory = build(folder, options.profile)
            each = [1000 * value / (images * TARGETS) for value in (wall, used)]
            rows.append([images, jobs, first, wall, *each, *memory])
            print(tabulate(rows[-1:], tablefmt="plain", floatfmt=".2f"), flush=True)
        finally:
            shutil.rmtree(folder)
    head = ["images", "jobs", "first job [s]", "wall [s]", "ms a target", "processor time"]
    print("\n" + tabulate(rows, headers=[*head, "planner [MB]", "job [MB]"], floatfmt=".2f"))


if __name__ == "__main__":
    main()
