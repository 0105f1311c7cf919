"""GPUs that this process may use, according to their drivers, and their locks.

Planning needs the number of GPUs, so this module does not import torch. One job at a time holds a
GPU of this machine. Jobs of one user never share a GPU, even if they belong to different projects.
"""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path

from latentmake.base.atomic import Lock
from latentmake.base.errors import StorageError
from latentmake.base.machine import said

VARIABLES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
"""Environment variables that choose GPUs."""

_ALLOCATION = "SLURM_JOB_ID"
_POLL_SECONDS = 0.2
_LISTED = re.compile(r"^GPU (\d+): .*\(UUID: ([\w-]+)\)", re.MULTILINE)
_BFLOAT16 = 8  # lowest compute capability of NVIDIA GPUs that compute in bfloat16


def visible() -> list[str]:
    """Return the ids of the GPUs that this process may use, as in CUDA_VISIBLE_DEVICES."""
    for variable in VARIABLES:
        if (named := os.environ.get(variable)) is not None:
            names = dict.fromkeys(name.strip() for name in named.split(","))
            return [name for name in names if name not in ("", "-1")]
    return _installed()


def _installed() -> list[str]:
    """Return the ids of the GPUs that a driver of NVIDIA or AMD lists."""
    for command, beginning in (
        (["nvidia-smi", "-L"], "GPU "),
        (["rocm-smi", "--showid", "--csv"], "card"),
    ):
        if output := said(*command):
            lines = [line for line in output.splitlines() if line.startswith(beginning)]
            return [str(number) for number in range(len(lines))]
    return []


@cache
def device() -> str:
    """Return the name of the first GPU that this process may use, or `cpu` without one."""
    if not (ids := visible()):
        return "cpu"
    output = said("nvidia-smi", f"--id={ids[0]}", "--query-gpu=name", "--format=csv,noheader")
    return output or "GPU"


def computes_bfloat16() -> bool | None:
    """Return whether all NVIDIA GPUs compute in bfloat16; older ones only emulate it.

    The result is None if no NVIDIA GPU is visible.
    """
    if not visible():
        return None
    output = said("nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader")
    generations = [int(major) for major in re.findall(r"^(\d+)\.\d", output, re.MULTILINE)]
    return min(generations) >= _BFLOAT16 if generations else None


def chosen() -> dict[str, str]:
    """Return the environment variables of this process that choose GPUs."""
    return {name: os.environ[name] for name in VARIABLES if name in os.environ}


# -- locks ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def lease(say: Callable[[str], None] = lambda line: None) -> Iterator[str | None]:
    """Hold one GPU for an encoding job, and say which one; see `hold`."""
    with hold(1, "encoding", say) as taken:
        say(f"GPU: {taken}" if taken else "no GPU")
        yield taken


@contextlib.contextmanager
def hold(count: int, about: str, say: Callable[[str], None]) -> Iterator[str | None]:
    """Lock GPUs for this process, and hide the others from later imports and from child processes.

    Waits while other jobs hold the GPUs. Two cases need no lock. A single GPU with an unknown UUID
    is not locked, because in a cluster its number 0 may mean another GPU for each job. A job that
    takes all GPUs of a SLURM allocation does not lock them, because SLURM reserves them.

    Args:
        count: number of GPUs: 1 takes any free GPU, more take the first ones in order of UUID.
        about: purpose, shown to jobs that wait.
        say: function that shows who holds the GPUs while this waits.

    Yields:
        Ids of the GPUs; None on a machine without GPUs.

    Raises:
        StorageError: the folder of the locks belongs to another user.
    """
    ids = visible()
    listed = dict(_LISTED.findall(said("nvidia-smi", "-L"))) if ids else {}
    # CUDA accepts the number of a GPU or the beginning of its UUID.
    uuids = {
        gpu: listed.get(gpu)
        or next((uuid for uuid in listed.values() if uuid.startswith(gpu)), gpu)
        for gpu in ids
    }
    unknown = len(ids) == 1 and uuids[ids[0]] not in listed.values()
    if unknown or (_ALLOCATION in os.environ and count >= len(ids)) or not ids:
        yield ",".join(ids) or None
        return
    variable = next((name for name in VARIABLES if name in os.environ), VARIABLES[0])
    folder = _folder()
    locks = {
        name: Lock(folder / f"gpu-{uuids[name].replace('/', '_')}.lock", about)
        for name in sorted(ids, key=lambda name: uuids[name])
    }
    # All jobs lock several GPUs in the same order, so two jobs never wait for each other.
    choices = [[*locks]] if count == 1 else [[name] for name in locks][:count]
    with contextlib.ExitStack() as held:
        taken = set()
        for names in choices:
            name = _first({name: locks[name] for name in names}, say)
            held.callback(locks[name].close)
            taken.add(name)
        os.environ[variable] = ",".join(name for name in ids if name in taken)
        try:
            yield os.environ[variable]
        finally:
            os.environ[variable] = ",".join(ids)


def _first(locks: Mapping[str, Lock], say: Callable[[str], None]) -> str:
    """Acquire the first free lock, and return its name; wait until one is free."""
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
    """Return the folder of this user's locks; all projects on the machine share it."""
    folder = Path(tempfile.gettempdir()) / f"latentmake-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    # A link of another user in its place could make us overwrite one of our own files.
    if folder.is_symlink() or not folder.is_dir() or folder.stat().st_uid != os.getuid():
        what = "belongs to another user, but must hold your lock files of GPUs"
        hint = "remove it, or set TMPDIR to a folder of your own"
        raise StorageError(what, where=folder, hint=hint)
    return folder
