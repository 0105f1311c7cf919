"""A child's output is seen and kept, and no descendant outlives it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from latentmake.training.process import last_error, run_program

# Starts a grandchild in a session of its own, as torch's launcher does, and ends never.
FAMILY = """
import subprocess, sys, time
code = "import time; print('grandchild', flush=True); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
open(sys.argv[1], "w").write(str(child.pid))
time.sleep(600)
"""
# The launcher that began it is gone.
ORPHAN = """
import os, subprocess, sys, time
if not os.fork():
    code = "import time; print('grandchild', flush=True); time.sleep(600)"
    child = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    open(sys.argv[1], "w").write(str(child.pid))
    os._exit(0)
time.sleep(600)
"""
STARTER = """
import os, sys
from pathlib import Path
from latentmake.training.process import run_program
command = [sys.executable, "-c", sys.argv[1], sys.argv[2]]
try:
    run_program(command, environment=os.environ, log=Path(sys.argv[3]))
except KeyboardInterrupt:
    sys.exit(77)
"""


def _wait(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_output_is_shown_and_appended_to_the_log_byte_by_byte(
    tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    log = tmp_path / "logs/train.log"
    code = r"import os; os.write(1, b'a\r\xff'); os.write(2, b'b\n'); raise SystemExit(3)"
    for _ in range(2):
        status, output = run_program([sys.executable, "-c", code], environment=os.environ, log=log)
        assert status == 3
        assert output == "a\r�b\n"
    assert log.read_bytes() == b"a\r\xffb\n" * 2
    assert capfdbinary.readouterr().err == b"a\r\xffb\n" * 2


@pytest.mark.parametrize(
    ("number", "status"),
    [
        (signal.SIGINT, 77),
        (signal.SIGTERM, 77),
        (signal.SIGHUP, 77),
        (signal.SIGKILL, -signal.SIGKILL),
    ],
)
@pytest.mark.parametrize("family", [FAMILY, ORPHAN], ids=["launcher lives", "launcher died"])
def test_no_descendant_outlives_a_process_however_it_ends(
    tmp_path: Path, number: signal.Signals, status: int, family: str
) -> None:
    note, log = tmp_path / "pid", tmp_path / "log"
    package = Path(__file__).parents[3] / "scripts"
    starter = subprocess.Popen(
        [sys.executable, "-c", STARTER, family, str(note), str(log)],
        env={**os.environ, "PYTHONPATH": str(package)},
    )
    _wait(lambda: log.is_file() and b"grandchild" in log.read_bytes())
    _wait(lambda: note.is_file() and note.read_text() != "")
    started = [psutil.Process(int(note.read_text()))]
    started += psutil.Process(starter.pid).children(recursive=True)
    starter.send_signal(number)
    assert starter.wait(300) == status
    _, alive = psutil.wait_procs(started, timeout=100)
    assert not [each for each in alive if each.status() != psutil.STATUS_ZOMBIE]


INTERRUPTED = """
import signal, sys, time
try:
    print("begun", flush=True)
    time.sleep(600)
except KeyboardInterrupt:
    print("Traceback of whoever was interrupted", flush=True)
"""


def test_what_is_said_after_ctrl_c_is_for_the_log_alone(tmp_path: Path) -> None:
    log = tmp_path / "log"
    package = Path(__file__).parents[3] / "scripts"
    starter = subprocess.Popen(
        [sys.executable, "-c", STARTER, INTERRUPTED, "", str(log)],
        env={**os.environ, "PYTHONPATH": str(package)},
        stderr=subprocess.PIPE,
        text=True,
    )
    _wait(lambda: log.is_file() and b"begun\n" in log.read_bytes())
    starter.send_signal(signal.SIGINT)
    _, said = starter.communicate(timeout=300)
    assert starter.returncode == 77
    assert said == "begun\n"
    assert log.read_text() == "begun\nTraceback of whoever was interrupted\n"


LAUNCHED = """
  0%|          | 0/10 [00:00<?, ?step/s]\rTraceback (most recent call last):
  File "sd.py", line 1, in <module>
{line}
Traceback (most recent call last):
  File "launch.py", line 7, in <module>
subprocess.CalledProcessError: Command '['python']' returned non-zero exit status 1.
"""


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("error: the loss is no number", "the loss is no number"),
        ("ValueError: that is wrong", "ValueError: that is wrong"),
        ("torch.cuda.SomeError: no device", "torch.cuda.SomeError: no device"),
        ("[rank0]: RuntimeError: broken", "RuntimeError: broken"),
        ("train.py: error: unrecognized arguments: --x", "unrecognized arguments: --x"),
        ("", "it ended with status 1"),
    ],
)
def test_the_childs_own_error_is_found_among_the_launchers(line: str, expected: str) -> None:
    assert last_error(LAUNCHED.format(line=line), 1) == expected


def test_a_kill_is_named() -> None:
    assert "SIGKILL" in last_error("", -9)
    for launcher in (
        "subprocess.CalledProcessError: Command '['python']' died with <Signals.SIGKILL: 9>.",
        "  exitcode  : -9 (pid: 7)\n  traceback : Signal 9 (SIGKILL) received by PID 7",
    ):
        assert last_error(launcher, 1) == "it was killed by SIGKILL (too little memory?)"
