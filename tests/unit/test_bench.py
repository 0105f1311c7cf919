"""The measurements of tests/bench, which are run by hand, find what they import."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[1] / "bench"


@pytest.mark.parametrize("name", sorted(path.name for path in BENCH.glob("*.py")))
def test_a_measurement_starts(name: str) -> None:
    command = [sys.executable, BENCH / name, "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
