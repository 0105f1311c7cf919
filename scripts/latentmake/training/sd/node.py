"""One node of a training over several, started by `srun`; checks of accelerate's configuration.

    srun --ntasks-per-node=1 python -m latentmake.training.sd.node --processes 4 --multi_gpu -m ...

It tells `accelerate launch` the rank of this machine and the address of the first one; all else is
passed on. SLURM's variables are those of srun's manual (SLURM_NODEID and its like).
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

from latentmake.errors import TrainingError, first_line

__all__ = ["accelerate_command", "check_accelerate", "refuse_sharded", "srun_command"]

_PORTS = range(20_000, 40_000)
_REPLICATED = ("NO", "MULTI_GPU", "MULTI_CPU")


def refuse_sharded(kind: str, where: str = "trainer.accelerate_config") -> None:
    """Check that each process of a training holds the model and optimizer in full.

    Args:
        kind: accelerate's `distributed_type`.
        where: it was set.

    Raises:
        TrainingError: it is another, such as DeepSpeed's ZeRO or FSDP.
    """
    if kind not in _REPLICATED:
        raise TrainingError(
            f"the sd trainer does not train under {kind}",
            where=where,
            mend="choose one device or multi-GPU in `accelerate config`, without DeepSpeed or FSDP",
        )


def check_accelerate(config: Path) -> None:
    """Check a configuration file of `accelerate launch`.

    Raises:
        TrainingError: it cannot be read, or shards the model or the optimizer.
    """
    try:
        content = yaml.safe_load(config.read_bytes())  # JSON is YAML
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise TrainingError(
            f"this configuration of accelerate cannot be read ({first_line(error)})",
            where=config,
            mend="correct the trainer's `accelerate_config`, or make it by `accelerate config "
            f"--config_file {config}`",
        ) from None
    if isinstance(content, dict):
        refuse_sharded(str(content.get("distributed_type") or "NO"), str(config))


def srun_command(environment: Mapping[str, str], processes: int) -> list[str]:
    """Return what starts a training on all nodes of this SLURM job, up to accelerate's options.

    Args:
        environment: of the job.
        processes: devices of each node.

    Returns:
        An empty list where the job has one node, or there is no job.
    """
    nodes = int(environment.get("SLURM_JOB_NUM_NODES", "1"))
    if nodes == 1:
        return []
    # The job's own step holds all of its resources already: --overlap.
    tasks = [f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1", "--overlap"]
    module = [sys.executable, "-m", "latentmake.training.sd.node"]
    return ["srun", *tasks, *module, "--processes", str(processes)]


def accelerate_command(
    environment: Mapping[str, str], first: str, processes: int, arguments: Sequence[str]
) -> list[str]:
    """Return the command of this node.

    Args:
        environment: of srun's task.
        first: name of the first node, where the others meet.
        processes: devices of each node.
        arguments: accelerate's further options, and what it shall launch.
    """
    nodes = int(environment["SLURM_JOB_NUM_NODES"])
    # The same for all nodes, another for each job.
    port = _PORTS[int(environment["SLURM_JOB_ID"]) % len(_PORTS)]
    return [
        *(sys.executable, "-m", "latentmake.training.sd.quiet_launch"),
        *("--num_machines", str(nodes), "--machine_rank", environment["SLURM_NODEID"]),
        *("--main_process_ip", first, "--main_process_port", str(port)),
        *("--num_processes", str(nodes * processes)),
        *arguments,
    ]


def _first_node(environment: Mapping[str, str]) -> str:
    asked = ["scontrol", "show", "hostnames", environment["SLURM_JOB_NODELIST"]]
    return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.split()[0]


def _main(arguments: Sequence[str]) -> None:
    """Become accelerate."""
    _, processes, *rest = arguments
    environment = os.environ
    command = accelerate_command(environment, _first_node(environment), int(processes), rest)
    os.execv(command[0], command)  # noqa: S606 -- a list, no shell


if __name__ == "__main__":
    _main(sys.argv[1:])
