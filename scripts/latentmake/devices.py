"""The GPUs of this machine: how many there are, and which of them a job may have for itself.

No torch here: the number is needed while planning. A job holds a lock on the GPU it was given, so
that jobs side by side on one machine never share one; on a cluster the scheduler has seen to that.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

__all__ = ["lease", "visible"]

_FOLDER = Path(".latentmake/devices")
_VARIABLES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
_PATIENCE = 0.2  # seconds between two looks at GPUs that are all taken


def visible() -> list[str]:
    """Return the ids of the GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    for variable in _VARIABLES:
        if (named := os.environ.get(variable)) is not None:
            return [each.strip() for each in named.split(",") if each.strip() not in ("", "-1")]
    for command in (["nvidia-smi", "-L"], ["rocm-smi", "--showid", "--csv"]):
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
            beginning = "GPU " if command[0] == "nvidia-smi" else "card"
            lines = [line for line in done.stdout.splitlines() if line.startswith(beginning)]
            return [str(number) for number in range(len(lines))]
    return []


@contextlib.contextmanager
def lease() -> Iterator[str | None]:
    """Hold one GPU for this process alone, and hide the others from what it imports later.

    Waits where all are taken. Where there is one or none, nothing is locked: two GPUs' worth of
    jobs cannot be there either.

    Yields:
        Its id; None where there is no GPU.
    """
    found = visible()
    if len(found) < 2:
        yield found[0] if found else None
        return
    variable = next((name for name in _VARIABLES if name in os.environ), _VARIABLES[0])
    folder = _FOLDER / socket.gethostname()
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        taken = None
        while taken is None:
            for name in found:
                file = stack.enter_context((folder / name.replace("/", "_")).open("a"))
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError:
                    file.close()
                    continue
                taken = name
                break
            else:
                time.sleep(_PATIENCE)
        os.environ[variable] = taken
        try:
            yield taken
        finally:
            os.environ[variable] = ",".join(found)
