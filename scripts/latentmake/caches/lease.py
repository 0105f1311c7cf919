"""Locks of GPUs: each GPU of this machine is held by one job at a time.

Jobs of one user never share a GPU, whichever projects they belong to.
"""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from latentmake.caches.gpu import VARIABLES, output_of, visible
from latentmake.errors import StorageError
from latentmake.files.atomic import Lock

_ALLOCATION = "SLURM_JOB_ID"

_POLL_SECONDS = 0.2

_LISTED = re.compile(r"^GPU (\d+): .*\(UUID: ([\w-]+)\)", re.MULTILINE)


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
    found = visible()
    listed = dict(_LISTED.findall(output_of(["nvidia-smi", "-L"]))) if found else {}
    # CUDA takes a GPU by its number or by the beginning of its UUID.
    begins = {x: [each for each in listed.values() if each.startswith(x)] for x in found}
    uuids = {name: listed.get(name) or (*begins[name], name)[0] for name in found}
    unknown = len(found) == 1 and uuids[found[0]] not in listed.values()
    if unknown or (_ALLOCATION in os.environ and count >= len(found)) or not found:
        yield ",".join(found) or None
        return
    variable = next((name for name in VARIABLES if name in os.environ), VARIABLES[0])
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
