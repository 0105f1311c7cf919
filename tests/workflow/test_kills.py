"""A command that is killed, by whatever signal, ends with the same bytes when it is run again."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

KILLS = Path(__file__).parents[1] / "bench/kills.py"
DRAWN = {"build": (0, 27), "train": (10, 28), "scripted": (22, 31), "link": (6, 33)}
"""Kind of command -> numbers of kills: one by SIGINT, SIGTERM or SIGHUP, and one by SIGKILL."""


def test_each_kind_of_command_survives_each_signal(tmp_path: Path) -> None:
    numbers = [str(number) for pair in DRAWN.values() for number in pair]
    options = ["--only", *numbers, "--folder", str(tmp_path / "kills")]
    command = [sys.executable, str(KILLS), *options]
    said = tmp_path / "said.txt"  # no pipe: the process that forks holds it as long as tests run
    with said.open("w") as file:
        done = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, check=False)
    assert done.returncode == 0, said.read_text()
