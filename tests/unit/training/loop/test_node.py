"""A training over several nodes: the same command on each, told apart by rank alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from latentmake.training.loop.node import accelerate_command, srun_command

JOB = {"SLURM_JOB_NUM_NODES": "3", "SLURM_JOB_ID": "123456", "SLURM_NODEID": "2"}


@pytest.mark.parametrize("environment", [{}, {"SLURM_JOB_NUM_NODES": "1"}])
def test_one_node_needs_no_srun(environment: dict[str, str]) -> None:
    assert srun_command(environment, 4) == []


def test_each_node_gets_one_task_that_becomes_accelerate() -> None:
    command = srun_command(JOB, 4)
    assert command[0] == "srun"
    assert {"--nodes=3", "--ntasks=3", "--ntasks-per-node=1"} <= set(command)
    assert command[-4:] == ["-m", "latentmake.training.loop.node", "--processes", "4"]


def test_the_nodes_differ_by_their_rank_alone() -> None:
    rest = [
        "--multi_gpu",
        "--mixed_precision",
        "bf16",
        "-m",
        "latentmake.training.sd.recipe",
        "o.json",
    ]
    commands = [
        accelerate_command({**JOB, "SLURM_NODEID": str(rank)}, "node7", 4, rest)
        for rank in range(3)
    ]
    for rank, command in enumerate(commands):
        at = command.index("--machine_rank")
        assert command[at + 1] == str(rank)
        command[at + 1] = "0"
    assert commands[0] == commands[1] == commands[2]
    options = dict(zip(commands[0], commands[0][1:], strict=False))
    assert options["--num_machines"] == "3" and options["--num_processes"] == "12"
    assert options["--main_process_ip"] == "node7"
    assert 20_000 <= int(options["--main_process_port"]) < 40_000
    assert commands[0][-6:] == rest


def test_accelerate_knows_all_these_options() -> None:
    command = accelerate_command(JOB, "node7", 1, ["--multi_gpu", "/nothing/to/launch.py"])
    # It reads all options, then has no such script, or on this machine no GPU, to launch.
    done = subprocess.run(
        [*command[:3], "--help", "--multi_gpu"],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[4] / "scripts")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0 and command[0] == sys.executable
    for option in command[3:]:
        if option.startswith("--") and option != "--multi_gpu":  # of which the help has groups
            assert option in done.stdout
