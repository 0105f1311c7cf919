"""The measurements of tests/bench, which are run by hand, find what they import."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

BENCH = Path(__file__).parents[1] / "bench"
# All in one process, so that the large libraries are imported once.
START = """
import os, runpy, sys

for path in sys.argv[1:]:
    sys.path.insert(0, os.path.dirname(path))
    runpy.run_path(path, run_name="started")
"""


def test_a_measurement_starts() -> None:
    places = sorted(map(str, BENCH.glob("*.py")))
    command = [sys.executable, "-c", START, *places]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
