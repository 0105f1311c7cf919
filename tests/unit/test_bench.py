"""The measurements of tests/bench, which are run by hand, find what they import."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

BENCH = Path(__file__).parents[1] / "bench"
# Each in a child of one process that has imported the large libraries, which take longest.
START = """
import os, runpy, sys
import accelerate, diffusers, torch, transformers

for path in sys.argv[1:]:
    if os.fork() == 0:
        sys.path[0] = os.path.dirname(path)
        sys.argv = [path, "--help"]
        runpy.run_path(path, run_name="__main__")
        os._exit(0)  # no program of its own
    if os.wait()[1]:
        sys.exit(f"{path} does not start")
"""


def test_a_measurement_starts() -> None:
    places = sorted(map(str, BENCH.glob("*.py")))
    command = [sys.executable, "-c", START, *places]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
