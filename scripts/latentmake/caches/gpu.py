"""GPUs that this process may use, as their drivers tell.

No torch here: planning asks for the number of GPUs. `caches.lease` gives each to one job at a time.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess

VARIABLES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
"""Environment variables that choose GPUs."""

_BFLOAT16 = 8  # compute capability from which on GPUs of NVIDIA's compute in bfloat16


def visible() -> list[str]:
    """Return the ids of the GPUs that this process may use, as in CUDA_VISIBLE_DEVICES."""
    for variable in VARIABLES:
        if (named := os.environ.get(variable)) is not None:
            names = dict.fromkeys(each.strip() for each in named.split(","))
            return [each for each in names if each not in ("", "-1")]
    for command, beginning in (
        (["nvidia-smi", "-L"], "GPU "),
        (["rocm-smi", "--showid", "--csv"], "card"),
    ):
        if output := output_of(command):
            lines = [line for line in output.splitlines() if line.startswith(beginning)]
            return [str(number) for number in range(len(lines))]
    return []


def computes_bfloat16() -> bool:
    """Return whether GPUs are visible and all are NVIDIA's of capability 8.0 or more."""
    return bool(visible() and (found := _generations())) and min(found) >= _BFLOAT16


def emulates_bfloat16() -> bool:
    """Return whether GPUs are visible, of which one of NVIDIA's is older than that."""
    return bool(visible() and (found := _generations())) and min(found) < _BFLOAT16


def _generations() -> list[int]:
    """Return the first number of the compute capability of each GPU of NVIDIA's."""
    output = output_of(["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"])
    return [int(major) for major in re.findall(r"^(\d+)\.\d", output, re.MULTILINE)]


def chosen() -> dict[str, str]:
    """Return the variables of this process's environment that choose GPUs."""
    return {name: os.environ[name] for name in VARIABLES if name in os.environ}


def output_of(command: list[str]) -> str:
    """Return a program's output; "" if there is no such program, or it fails."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
        return done.stdout
    return ""
