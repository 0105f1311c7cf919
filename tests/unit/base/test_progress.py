"""Progress in a file is a line now and then; on a terminal a bar."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest
import tqdm
from latentmake.base import progress
from latentmake.base.progress import Progress

TICK = 0.5  # seconds of the test's clock that a round takes


class Clock:
    """A clock that goes on when it is told to, however long that takes."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now

    def rounds(self, bar: Progress, *, said_each: int = 10**9) -> None:
        for number in bar:
            self.now += TICK
            if number % said_each == 0:
                Progress.write(f"said {number}", file=sys.stderr)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(tqdm.std, "time", clock)
    monkeypatch.setattr(Progress, "monitor_interval", 0)  # a thread that looks at the real one
    monkeypatch.delenv("LATENTMAKE_TERMINAL", raising=False)
    return clock


def cats() -> Progress:
    return Progress(range(1000), desc="latents of cats", unit="target")


def test_in_a_file_progress_is_a_line_each_30_seconds_however_often_it_moves_or_something_is_said(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    clock.rounds(cats(), said_each=100)
    said = capsys.readouterr().err
    lines = [line for line in said.splitlines() if not line.startswith("said ")]
    assert "\r" not in said
    assert [line.split(",")[0] for line in lines] == [
        f"latents of cats: {done} of 1000" for done in range(60, 1000, 60)
    ]
    assert lines[0].split(",  ")[1] == "2.00 target/s, 07:50 left"


def test_what_ends_within_30_seconds_shows_no_progress(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(20):
        clock.rounds(Progress(range(59), desc="short"), said_each=10)
    assert {line.split()[0] for line in capsys.readouterr().err.splitlines()} == {"said"}


@pytest.mark.parametrize("terminal", ["0", "1"])
def test_a_status_ends_each_line_and_is_asked_for_when_one_is_drawn(
    terminal: str, clock: Clock, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LATENTMAKE_TERMINAL", terminal)
    asked: list[str] = []

    def status() -> str:
        asked.append(f"asked {len(asked) + 1} times")
        return asked[-1]

    bar = cats()
    bar.status = status
    clock.rounds(bar)
    drawn = [line for line in re.split(r"[\r\n]+", capsys.readouterr().err) if line.strip()]
    lines = [line for line in drawn if re.search(r", asked \d+ times\]?$", line.rstrip())]
    assert len(asked) == len(lines) >= len(drawn) - 2  # before it was given, and a bar's end
    assert terminal == "1" or len(lines) < 20


def test_behind_a_pipe_to_a_terminal_progress_is_a_bar(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LATENTMAKE_TERMINAL", "1")
    clock.rounds(cats())
    assert capsys.readouterr().err.count("\r") > 500


def test_on_a_terminal_progress_is_a_bar(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w") as file, monkeypatch.context() as patched:
        patched.setattr(sys, "stderr", file)
        clock.rounds(Progress(range(3), desc="short"))
        assert b"\r" in os.read(ours, 1 << 16)
    os.close(ours)


def test_the_bars_of_a_launched_program_are_slow_where_there_is_no_terminal(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(progress, "_SECONDS", 1e6)
    monkeypatch.delenv("LATENTMAKE_TERMINAL", raising=False)
    with (tmp_path / "stderr").open("w") as file:
        monkeypatch.setattr(sys, "stderr", file)
        told = progress.environment()
    other = "import time\nfrom tqdm import tqdm\nfor _ in tqdm(range(600)): time.sleep(0.001)"
    ended = subprocess.run(
        [sys.executable, "-c", other], env=os.environ | told, capture_output=True, check=True
    )
    assert ended.stderr.count(b"\r") <= 2  # its beginning and its end
