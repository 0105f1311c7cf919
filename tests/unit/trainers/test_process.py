"""Programs of a training: their output is kept, none outlives its job, each has its GPUs alone."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from latentmake.base import atomic
from latentmake.base.errors import TrainingError
from latentmake.trainers.process import (
    ERROR,
    last_error,
    run_child,
    run_lock,
    run_program,
    say_error,
)

SCRIPTS = Path(__file__).parents[3] / "scripts"
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
from latentmake.trainers.process import run_program
command = [sys.executable, "-c", sys.argv[1], sys.argv[2]]
try:
    run_program(command, environment=os.environ, log=Path(sys.argv[3]))
except KeyboardInterrupt:
    sys.exit(77)
"""


def _start(code: str, *arguments: object, **options: Any) -> subprocess.Popen[str]:
    """Start code that imports the package."""
    environment = {**os.environ, **options.pop("env", {}), "PYTHONPATH": str(SCRIPTS)}
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(command, env=environment, text=True, **options)


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
    starter = _start(STARTER, family, note, log)
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
    starter = _start(STARTER, INTERRUPTED, "", log, stderr=subprocess.PIPE)
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


@pytest.mark.skipif(sys.platform != "linux", reason="OpenMP of macOS has no such count")
def test_threads_of_a_training_spin_before_they_sleep_unless_the_user_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "OMP_NUM_THREADS")
    command = [sys.executable, "-c", f"import os; print(*map(os.environ.get, {names}))"]
    for given in ({}, {names[0]: "PASSIVE"}):
        for name in names:
            monkeypatch.delenv(name, raising=False)
        for name, value in given.items():
            monkeypatch.setenv(name, value)
        log = tmp_path / "log"
        run_child(command, run="cats", folder=tmp_path, threads=3, log=log, online=False)
    assert log.read_text().split() == ["ACTIVE", "10000", "3", "PASSIVE", "None", "3"]


def test_a_kill_is_named() -> None:
    assert "SIGKILL" in last_error("", -9)
    for launcher in (
        "subprocess.CalledProcessError: Command '['python']' died with <Signals.SIGKILL: 9>.",
        "  exitcode  : -9 (pid: 7)\n  traceback : Signal 9 (SIGKILL) received by PID 7",
    ):
        assert last_error(launcher, 1) == "it was killed by SIGKILL (too little memory?)"


# -- one training of a run at a time --------------------------------------------------------------

# A training whose launcher keeps no file open.
LOCKED = """
import os, sys
from pathlib import Path
from latentmake.trainers.process import run_lock, run_program
launcher = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"
trains = "import time; print('trains', flush=True); time.sleep(600)"
with run_lock(Path(sys.argv[1]), print):
    command = [sys.executable, "-c", launcher, trains]
    run_program(command, environment=os.environ, log=Path(sys.argv[2]))
"""


def _refused(run: Path) -> str:
    with pytest.raises(TrainingError) as refused, run_lock(run, print):
        pass
    return str(refused.value)


def test_a_second_training_is_refused_until_all_of_the_first_has_ended(tmp_path: Path) -> None:
    run, log = tmp_path / "runs/cats", tmp_path / "log"
    job = _start(LOCKED, run, log, stderr=subprocess.PIPE, cwd=tmp_path)
    assert job.stderr is not None and job.stderr.readline() == "trains\n"
    holder = f"process {job.pid} on {socket.gethostname()} (training in {tmp_path})"
    second = (
        f"{run}: another training of this run is running: {holder}; wait until it ends, or stop it"
    )
    assert _refused(run) == second
    job.send_signal(signal.SIGKILL)
    job.stderr.read()  # until nobody has it open: the training neither
    job.wait()
    lock = atomic.Lock(run / ".training.lock", "test")
    assert lock.acquire(wait=True)  # its watchdog may hold it for a moment longer
    lock.close()
    with run_lock(run, print):
        assert "process" in _refused(run)
    with run_lock(run, print):
        pass


def test_where_nothing_can_be_locked_a_training_begins_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(*_: object) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", none)
    said: list[str] = []
    with run_lock(tmp_path, said.append):
        assert said == [
            f"warning: {tmp_path}/.training.lock: Function not implemented: "
            "begin no second training of this run"
        ]


def test_a_childs_mistake_is_told_where_the_disk_is_full(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    full = TrainingError("no space left on the disk", where="runs/cats/checkpoints")
    monkeypatch.setenv(ERROR, "/dev/full")
    say_error(full)
    assert last_error(capsys.readouterr().err, 1) == str(full)


# -- GPUs -----------------------------------------------------------------------------------------

# A launcher, and what it launches.
ON_GPUS = """
import sys
from pathlib import Path
from latentmake.trainers.process import run_child
seen = "*map(os.environ.get, ('OMP_NUM_THREADS', 'CUDA_VISIBLE_DEVICES'))"
trains = f"import os, time; print(os.getpid(), {seen}, flush=True)"
launcher = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"
command = [sys.executable, "-c", launcher, trains + "; time.sleep(600)"]
run_child(command, run=sys.argv[1], folder=Path(sys.argv[1]), threads=1,
          log=Path("log"), online=False, gpus=2)
"""


def test_a_second_project_waits_until_all_is_gone_that_used_the_first_ones_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\necho 'GPU 0: A (UUID: GPU-a)'\necho 'GPU 1: B (UUID: GPU-b)'\n")
    program.chmod(0o755)
    for name in [*os.environ]:
        if name.endswith(("SLURM_JOB_ID", "_VISIBLE_DEVICES")):
            monkeypatch.delenv(name)
    variables = {"PATH": f"{program.parent}:{os.environ['PATH']}", "TMPDIR": str(tmp_path)}

    def start(run: str) -> subprocess.Popen[str]:
        (tmp_path / run).mkdir()
        place = tmp_path / run
        return _start(ON_GPUS, run, env=variables, cwd=place, stderr=subprocess.PIPE)

    def says(job: subprocess.Popen[str]) -> str:
        assert job.stderr is not None
        return job.stderr.readline().strip()

    first = start("cats")
    process, threads, shown = says(first).split()
    assert (threads, shown) == ("1", "0,1")
    second = start("dogs")
    try:
        who = f"process {first.pid} on {socket.gethostname()} (run cats in {tmp_path}/cats)"
        assert says(second) == f"waiting for a GPU: {who} holds 0"
        first.kill()
        assert says(second).endswith(" 0,1")
        with contextlib.suppress(psutil.NoSuchProcess):
            assert psutil.Process(int(process)).status() == psutil.STATUS_ZOMBIE
        assert (tmp_path / "dogs/log").read_text().startswith(f"waiting for a GPU: {who}")
    finally:
        second.kill()
        for each in (first, second):
            each.communicate()
