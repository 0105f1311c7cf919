"""A command that is killed, by whatever signal, ends with the same bytes when it is run again."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

KILLS = Path(__file__).parents[1] / "bench/kills.py"
DRAWN = {"build": (9,), "train": (28,), "scripted": (58,), "link": (6, 33)}
"""Kind of command -> numbers of kills: by SIGTERM, SIGKILL, SIGHUP, and SIGINT and SIGKILL.

Other signals to builds and trainings: test_kill.py; to a training at each of its steps:
tests/unit/trainers/sd/test_stopped.py; to a job of scripts, in test_scripted_encoding.py there.
"""


def test_kinds_of_commands_survive_signals(tmp_path: Path) -> None:
    numbers = [str(number) for pair in DRAWN.values() for number in pair]
    options = ["--only", *numbers, "--folder", str(tmp_path / "kills")]
    command = [sys.executable, str(KILLS), *options]
    said = tmp_path / "said.txt"  # no pipe: the process that forks holds it as long as tests run
    with said.open("w") as file:
        done = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, check=False)
    assert done.returncode == 0, said.read_text()
