"""One node of a training over several, started by `srun`.

    srun --ntasks-per-node=1 python -m latentmake.training.loop.node --processes 4 --multi_gpu ...

It tells `accelerate launch` the rank of this machine and the address of the first one; all else is
passed on. SLURM's variables are those of srun's manual (SLURM_NODEID and its like).
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence

_PORTS = range(20_000, 40_000)


def srun_command(environment: Mapping[str, str], processes: int) -> list[str]:
    """Return the command that starts a training on all nodes of this SLURM job, to be continued.

    Args:
        environment: of the job.
        processes: devices of each node.

    Returns:
        All up to accelerate's options; nothing where the job has one node, or there is no job.
    """
    nodes = int(environment.get("SLURM_JOB_NUM_NODES", "1"))
    if nodes == 1:
        return []
    # The job's own step holds all of its resources already: --overlap.
    tasks = [f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1", "--overlap"]
    module = [sys.executable, "-m", "latentmake.training.loop.node", "--processes", str(processes)]
    return ["srun", *tasks, *module]


def accelerate_command(
    environment: Mapping[str, str], first: str, processes: int, arguments: Sequence[str]
) -> list[str]:
    """Return the command of this node.

    Args:
        environment: of srun's task.
        first: name of the first node.
        processes: devices of each node.
        arguments: accelerate's further options, and the module to launch.
    """
    nodes = int(environment["SLURM_JOB_NUM_NODES"])
    # The same for all nodes, another for each job.
    port = _PORTS[int(environment["SLURM_JOB_ID"]) % len(_PORTS)]
    return [
        *(sys.executable, "-m", "latentmake.training.loop.quiet_launch"),
        *("--num_machines", str(nodes), "--machine_rank", environment["SLURM_NODEID"]),
        *("--main_process_ip", first, "--main_process_port", str(port)),
        *("--num_processes", str(nodes * processes)),
        *arguments,
    ]


def _main(arguments: Sequence[str]) -> None:
    """Become accelerate."""
    _, processes, *rest = arguments
    asked = ["scontrol", "show", "hostnames", os.environ["SLURM_JOB_NODELIST"]]
    names = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.split()
    command = accelerate_command(os.environ, names[0], int(processes), rest)
    os.execv(command[0], command)  # noqa: S606 -- a list, no shell


if __name__ == "__main__":
    _main(sys.argv[1:])
