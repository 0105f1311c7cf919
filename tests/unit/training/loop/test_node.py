"""A training over several nodes: the same command on each, told apart by its rank alone."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

from latentmake.training.loop.launch import srun_command

JOB = {"SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_ID": str(os.getpid())}
SCRIPTS = Path(__file__).parents[4] / "scripts"


def test_each_node_gets_one_task_with_the_number_of_all_devices() -> None:
    command = srun_command(JOB, "node7", 4)
    assert command[0] == "srun"
    assert {"--nodes=2", "--ntasks=2", "--ntasks-per-node=1"} <= set(command)
    options = dict(pairwise(command))
    assert options["--num_machines"] == "2" and options["--num_processes"] == "8"
    assert options["--main_process_ip"] == "node7"
    assert 20_000 <= int(options["--main_process_port"]) < 40_000


def test_the_tasks_of_a_job_meet_and_know_their_ranks(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import os\nprint(*map(os.environ.get, ('RANK', 'WORLD_SIZE')))\n")
    command = srun_command(JOB, "127.0.0.1", 1)
    launcher = command[command.index(sys.executable) :]
    tasks = [
        subprocess.Popen(
            [*launcher, *("--multi_gpu", "--mixed_precision", "no"), str(script)],
            env={**os.environ, "SLURM_NODEID": str(node), "PYTHONPATH": str(SCRIPTS)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for node in range(2)
    ]
    assert [task.communicate(timeout=300)[0].split() for task in tasks] == [["0", "2"], ["1", "2"]]
