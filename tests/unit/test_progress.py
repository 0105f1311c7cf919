"""Progress in a file is a line now and then; on a terminal a bar."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
from latentmake import progress

_WORK = """
import sys, time
from latentmake import progress
progress._SECONDS = 0.2
bars = {bars}
for each in bars:
    for number in each:
        time.sleep(0.001)
        if number % 100 == 0:
            progress.Progress.write(f"said {{number}}", file=sys.stderr)
"""
_SCRIPTS = str(Path(progress.__file__).parents[1])
_ONE = "[progress.Progress(range(1000), desc='latents of cats', unit='target')]"
_MANY_SHORT = "(progress.Progress(range(20), desc='short') for _ in range(20))"


def _stderr(bars: str, **environment: str) -> str:
    command = [sys.executable, "-c", _WORK.format(bars=bars)]
    ended = subprocess.run(
        command,
        env=os.environ | {"PYTHONPATH": _SCRIPTS} | environment,
        stderr=subprocess.PIPE,
        check=True,
    )
    return ended.stderr.decode()


def test_in_a_file_progress_is_a_line_an_interval_however_often_it_moves_or_something_is_said() -> (
    None
):
    said = _stderr(_ONE)
    lines = [line for line in said.splitlines() if not line.startswith("said ")]
    assert "\r" not in said
    assert 2 <= len(lines) <= 8  # in 1.1 to 1.6 s, with one each 0.2 s
    for line in lines:
        assert line.startswith("latents of cats: ")
        assert " of 1000, " in line and " target/s, " in line and line.endswith(" left")


def test_what_ends_within_an_interval_shows_no_progress() -> None:
    assert [*filter(lambda line: "said" not in line, _stderr(_MANY_SHORT).splitlines())] == []


def test_behind_a_pipe_to_a_terminal_progress_is_a_bar() -> None:
    assert _stderr(_ONE, LATENTMAKE_TERMINAL="1").count("\r") > 5


def test_on_a_terminal_progress_is_a_bar() -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-c", _WORK.format(bars=_MANY_SHORT.replace("20))", "2))"))]
    subprocess.run(command, env=os.environ | {"PYTHONPATH": _SCRIPTS}, stderr=theirs, check=True)
    os.close(theirs)
    assert b"\r" in os.read(ours, 1 << 16)
    os.close(ours)


def test_the_bars_of_a_launched_program_are_slow_where_there_is_no_terminal(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with (tmp_path / "stderr").open("w") as file:
        monkeypatch.setattr(sys, "stderr", file)
        monkeypatch.delenv("LATENTMAKE_TERMINAL", raising=False)
        told = progress.environment()
    other = "import time\nfrom tqdm import tqdm\nfor _ in tqdm(range(600)): time.sleep(0.001)"
    ended = subprocess.run(
        [sys.executable, "-c", other], env=os.environ | told, capture_output=True, check=True
    )
    assert ended.stderr.count(b"\r") <= 2  # its beginning and its end
