"""GPUs of this machine, each held by one job at a time by a lock file.

Jobs of one user never share a GPU, whichever projects they belong to. No torch here: planning asks
for the number of GPUs.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from latentmake.errors import StorageError

if TYPE_CHECKING:
    from latentmake.files.atomic import Lock

_VARIABLES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
_ALLOCATION = "SLURM_JOB_ID"
_BFLOAT16 = 8  # compute capability from which on GPUs of NVIDIA's compute in bfloat16
_POLL_SECONDS = 0.2
_LISTED = re.compile(r"^GPU (\d+): .*\(UUID: ([\w-]+)\)", re.MULTILINE)


def visible() -> list[str]:
    """Return the ids of the GPUs that this process may use, as in CUDA_VISIBLE_DEVICES."""
    for variable in _VARIABLES:
        if (named := os.environ.get(variable)) is not None:
            names = dict.fromkeys(each.strip() for each in named.split(","))
            return [each for each in names if each not in ("", "-1")]
    for command, beginning in (
        (["nvidia-smi", "-L"], "GPU "),
        (["rocm-smi", "--showid", "--csv"], "card"),
    ):
        if output := _output(command):
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
    output = _output(["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"])
    return [int(major) for major in re.findall(r"^(\d+)\.\d", output, re.MULTILINE)]


def chosen() -> dict[str, str]:
    """Return the variables of this process's environment that choose GPUs."""
    return {name: os.environ[name] for name in _VARIABLES if name in os.environ}


@contextlib.contextmanager
def lease(say: Callable[[str], None] = lambda line: None) -> Iterator[str | None]:
    """Hold one GPU for an encoding job, and say which; see `hold`."""
    with hold(1, "encoding", say) as taken:
        say(f"GPU: {taken}" if taken else "no GPU")
        yield taken


@contextlib.contextmanager
def hold(count: int, about: str, say: Callable[[str], None]) -> Iterator[str | None]:
    """Lock some GPUs for this process, and hide the others from later imports and from children.

    Waits while others hold them. A single GPU is locked only if its UUID is known: number 0 may be
    another one for each job of a cluster. Nor is a SLURM allocation locked as a whole, which has
    its GPUs for itself; jobs in it share them out.

    Args:
        count: any one, or the first ones by their UUID.
        about: what they are held for, for those that wait.
        say: told who holds them, where this waits.

    Yields:
        Their ids; None on a machine without GPUs.

    Raises:
        StorageError: the folder of the locks belongs to somebody else.
    """
    from latentmake.files.atomic import Lock

    found = visible()
    listed = dict(_LISTED.findall(_output(["nvidia-smi", "-L"]))) if found else {}
    uuids = {name: _uuid(name, listed) for name in found}
    unknown = len(found) == 1 and uuids[found[0]] not in listed.values()
    if unknown or (_ALLOCATION in os.environ and count >= len(found)) or not found:
        yield ",".join(found) or None
        return
    variable = next((name for name in _VARIABLES if name in os.environ), _VARIABLES[0])
    folder = _folder()
    locks = {
        name: Lock(folder / f"gpu-{uuids[name].replace('/', '_')}.lock", about)
        for name in sorted(found, key=lambda name: uuids[name])
    }
    # Several in one order: two that hold some never wait for each other.
    choices = [[*locks]] if count == 1 else [[name] for name in locks][:count]
    with contextlib.ExitStack() as held:
        taken = set()
        for names in choices:
            name = _first({name: locks[name] for name in names}, say)
            held.callback(locks[name].close)
            taken.add(name)
        os.environ[variable] = ",".join(name for name in found if name in taken)
        try:
            yield os.environ[variable]
        finally:
            os.environ[variable] = ",".join(found)


def _uuid(name: str, listed: Mapping[str, str]) -> str:
    """Return the UUID of a GPU by its number or the beginning of its UUID, as CUDA takes either."""
    return listed.get(name) or next(
        (each for each in listed.values() if each.startswith(name)), name
    )


def _first(locks: Mapping[str, Lock], say: Callable[[str], None]) -> str:
    """Acquire the first free lock, and return its name."""
    waits = False
    while True:
        for name, lock in locks.items():
            if lock.acquire():
                return name
        if not waits:
            held = "; ".join(f"{lock.holder()} holds {name}" for name, lock in locks.items())
            say(f"waiting for a GPU: {held}")
        waits = True
        time.sleep(_POLL_SECONDS)


def _folder() -> Path:
    """Return the folder of this user's locks, shared by all projects and sessions on a machine."""
    folder = Path(tempfile.gettempdir()) / f"latentmake-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    # To write through another user's link would overwrite a file of this user.
    if folder.is_symlink() or not folder.is_dir() or folder.stat().st_uid != os.getuid():
        what = "belongs to another user, but must hold your lock files of GPUs"
        hint = "remove it, or set TMPDIR to a folder of your own"
        raise StorageError(what, where=folder, hint=hint)
    return folder


def _output(command: list[str]) -> str:
    """Return a program's output; "" if there is no such program, or it fails."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
        return done.stdout
    return ""
