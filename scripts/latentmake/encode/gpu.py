"""GPUs that this process may use, according to their drivers.

Planning needs the number of GPUs, so this module does not import torch. `caches.lease` lets only
one job at a time use a GPU.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess

VARIABLES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
"""Environment variables that choose GPUs."""

_BFLOAT16 = 8  # lowest compute capability of NVIDIA GPUs that compute in bfloat16


def visible() -> list[str]:
    """Return the ids of the GPUs that this process may use, as in CUDA_VISIBLE_DEVICES."""
    for variable in VARIABLES:
        if (named := os.environ.get(variable)) is not None:
            names = dict.fromkeys(name.strip() for name in named.split(","))
            return [name for name in names if name not in ("", "-1")]
    for command, beginning in (
        (["nvidia-smi", "-L"], "GPU "),
        (["rocm-smi", "--showid", "--csv"], "card"),
    ):
        if output := output_of(command):
            lines = [line for line in output.splitlines() if line.startswith(beginning)]
            return [str(number) for number in range(len(lines))]
    return []


def computes_bfloat16() -> bool:
    """Return whether NVIDIA GPUs are visible, all with compute capability 8.0 or more."""
    return bool(visible() and (generations := _generations())) and min(generations) >= _BFLOAT16


def emulates_bfloat16() -> bool:
    """Return whether GPUs are visible and an NVIDIA GPU has a compute capability below 8.0."""
    return bool(visible() and (generations := _generations())) and min(generations) < _BFLOAT16


def _generations() -> list[int]:
    """Return the major number of the compute capability of each NVIDIA GPU."""
    output = output_of(["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"])
    return [int(major) for major in re.findall(r"^(\d+)\.\d", output, re.MULTILINE)]


def chosen() -> dict[str, str]:
    """Return the environment variables of this process that choose GPUs."""
    return {name: os.environ[name] for name in VARIABLES if name in os.environ}


def output_of(command: list[str]) -> str:
    """Return a program's output, or "" if the program is missing or fails."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
        return done.stdout
    return ""
