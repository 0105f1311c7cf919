"""A child of a job computes on the GPUs that its job holds, and no other job's child beside it."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from pathlib import Path

import psutil
from latentmake import training

# A launcher, and what it launches.
JOB = """
import sys
from pathlib import Path
from latentmake.training.process import run_child
seen = "*map(os.environ.get, ('OMP_NUM_THREADS', 'CUDA_VISIBLE_DEVICES'))"
trains = f"import os, time; print(os.getpid(), {seen}, flush=True)"
launcher = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"
command = [sys.executable, "-c", launcher, trains + "; time.sleep(600)"]
run_child(command, run=sys.argv[1], folder=Path(sys.argv[1]), threads=1,
          log=Path("log"), online=False, gpus=2)
"""


def test_a_second_project_waits_until_all_is_gone_that_used_the_first_ones_gpus(
    tmp_path: Path,
) -> None:
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\necho 'GPU 0: A (UUID: GPU-a)'\necho 'GPU 1: B (UUID: GPU-b)'\n")
    program.chmod(0o755)
    slurm_or_gpus = ("SLURM_JOB_ID", "_VISIBLE_DEVICES")
    variables = {
        **{name: x for name, x in os.environ.items() if not name.endswith(slurm_or_gpus)},
        "PATH": f"{program.parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(Path(training.__path__[0]).parents[1]),
        "TMPDIR": str(tmp_path),
    }

    def start(run: str) -> subprocess.Popen[str]:
        (tmp_path / run).mkdir()
        return subprocess.Popen(
            [sys.executable, "-c", JOB, run],
            env=variables,
            cwd=tmp_path / run,
            stderr=subprocess.PIPE,
            text=True,
        )

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
