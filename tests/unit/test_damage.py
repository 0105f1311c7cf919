"""Odd configurations and damaged files end in one line or in a plan, in bounded time and memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

DAMAGE = Path(__file__).parents[1] / "bench/damage.py"


def test_whatever_is_odd_or_damaged_ends_in_one_line_or_in_a_plan(tmp_path: Path) -> None:
    command = [sys.executable, DAMAGE, "--cases", "64", "--folder", tmp_path / "damage"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
