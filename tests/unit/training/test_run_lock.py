"""A run is trained by one training at a time; nobody holds its lock once that has ended."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from latentmake.errors import TrainingError
from latentmake.files import atomic
from latentmake.training.process import run_lock

# A training whose launcher keeps no file open.
JOB = """
import os, sys
from pathlib import Path
from latentmake.training.process import run_lock, run_program
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
    package = str(Path(atomic.__file__).parents[2])
    job = subprocess.Popen(
        [sys.executable, "-c", JOB, str(run), str(log)],
        env={**os.environ, "PYTHONPATH": package},
        stderr=subprocess.PIPE,
        cwd=tmp_path,
    )
    assert job.stderr is not None and job.stderr.readline() == b"trains\n"
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
