"""GPUs of this machine, each leased to one job at a time by a lock file.

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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from latentmake.errors import StorageError

if TYPE_CHECKING:
    from filelock import FileLock

__all__ = ["lease", "visible"]

_VARIABLES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
_POLL_SECONDS = 0.2
_LISTED = re.compile(r"^GPU (\d+): .*\(UUID: ([\w-]+)\)", re.MULTILINE)


def visible() -> list[str]:
    """Return the ids of the GPUs that this process may use, as in CUDA_VISIBLE_DEVICES."""
    for variable in _VARIABLES:
        if (named := os.environ.get(variable)) is not None:
            return [each.strip() for each in named.split(",") if each.strip() not in ("", "-1")]
    for command, beginning in (
        (["nvidia-smi", "-L"], "GPU "),
        (["rocm-smi", "--showid", "--csv"], "card"),
    ):
        if output := _output(command):
            lines = [line for line in output.splitlines() if line.startswith(beginning)]
            return [str(number) for number in range(len(lines))]
    return []


@contextlib.contextmanager
def lease(say: Callable[[str], None] = lambda line: None) -> Iterator[str | None]:
    """Lock one GPU for this process, and hide the others from later imports.

    Waits while all are taken. A single GPU is locked only if its UUID is known: number 0 may be
    another one for each job of a cluster. Yields its id; None on a machine without GPUs.

    Raises:
        StorageError: the folder of the locks belongs to somebody else.
    """
    found = visible()
    uuids = dict(_LISTED.findall(_output(["nvidia-smi", "-L"]))) if found else {}
    if not found or (len(found) == 1 and found[0] not in (*uuids, *uuids.values())):
        say(f"GPU: {found[0]}" if found else "no GPU")
        yield found[0] if found else None
        return
    variable = next((name for name in _VARIABLES if name in os.environ), _VARIABLES[0])
    from filelock import FileLock  # not needed while planning

    folder = _folder()
    locks = {
        name: FileLock(folder / f"gpu-{uuids.get(name, name).replace('/', '_')}.lock")
        for name in found
    }
    taken = _first(locks)
    if taken is None:
        say(f"waiting for a GPU: other jobs hold {', '.join(found)} ({folder})")
    while taken is None:
        time.sleep(_POLL_SECONDS)
        taken = _first(locks)
    os.environ[variable] = taken
    say(f"GPU: {taken}")
    try:
        yield taken
    finally:
        os.environ[variable] = ",".join(found)
        locks[taken].release()


def _first(locks: dict[str, FileLock]) -> str | None:
    """Acquire the first free lock, if any, and return its name."""
    from filelock import Timeout

    for name, lock in locks.items():
        with contextlib.suppress(Timeout):
            lock.acquire(blocking=False)
            return name
    return None


def _folder() -> Path:
    """Return the folder of this user's locks, shared by all projects and sessions on a machine."""
    folder = Path(tempfile.gettempdir()) / f"latentmake-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    stat = folder.lstat()
    if not folder.is_dir() or folder.is_symlink() or stat.st_uid != os.getuid():
        raise StorageError(
            "is not a folder of yours, but must hold the locks of GPUs",
            where=folder,
            hint="remove it, or set TMPDIR to a folder of your own",
        )
    return folder


def _output(command: list[str]) -> str:
    """Return a program's output; "" if there is no such program, or it fails."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
        return done.stdout
    return ""
