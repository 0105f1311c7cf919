"""The spool: cache files that a build replaces, kept until it has ended well.

A file is named by its key. It is deleted once it has another name, that of a target; others go to
the store once a build has ended well, and are deleted where none does in a week.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from latentmake.errors import CacheError, StorageError
from latentmake.files import cachefile
from latentmake.plan import store
from latentmake.plan.orders import FOLDER, KEPT_SECONDS, RUNS, Order
from latentmake.plan.target import Target

SPOOL = Path(".latentmake/spool")
_BUILDING = Path(".latentmake/building.lock")


def spooled(key: str) -> Path:
    """Return the path that the file of a key has in the spool."""
    return SPOOL / f"{key}.safetensors"


def begin(orders: Sequence[Order], *, alone: bool = False) -> BinaryIO | None:
    """Clean up unless another build runs, and keep the files that some orders' jobs will replace.

    Called before any job, by a process that holds Snakemake's lock. That lock is one on files:
    builds of different files run side by side, and none may delete the others' files.

    Args:
        orders: of the build.
        alone: whether no other build may run beside this one; one that begins waits for its end.

    Returns:
        A file, locked until the process ends; None where the file system knows no locks.

    Raises:
        StorageError: this one is to be alone, and another build runs.
    """
    held: BinaryIO | None = None
    with contextlib.suppress(OSError):  # files left behind cost space, no more
        _BUILDING.parent.mkdir(parents=True, exist_ok=True)
        held = _BUILDING.open("wb")
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            forget_old({order.name for order in orders})
        except BlockingIOError:
            if alone:
                raise StorageError(
                    "another build is running here", hint="wait until it ends"
                ) from None
        if not alone:
            fcntl.flock(held, fcntl.LOCK_SH)
    keep_replaced(orders)
    return held


def end(held: BinaryIO | None, orders: Iterable[Order], keep: int) -> None:
    """Clean up after a successful build, unless another one runs.

    What is left in the spool goes to the store, where it counts.

    Args:
        held: result of `begin`.
        orders: of the build.
        keep: size of the store in bytes, at most.
    """
    if held is None:
        return
    with contextlib.suppress(OSError):
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        forget_delivered()
        for entry in _entries():  # left by builds that were killed, or that wrote no manifest
            if entry.is_file(follow_symlinks=False):
                store.put_away(Path(entry.path), Path(entry.path).stem)
        reused = _targets(order for order in orders if order.reuses)
        store.forget_taken({path for target in reused for path in target.at_hand})
        store.prune(keep)


def keep_replaced(orders: Iterable[Order]) -> None:
    """Link the files under the names of some orders' targets into the spool.

    Jobs replace them, and Snakemake deletes those that a job declares. If an edit or a change of
    the configuration is taken back, the next job takes them from there.
    """
    for target in _targets(orders):
        with contextlib.suppress(OSError, CacheError):  # it spares work, no more
            found, _, moment = (target.found or "").partition("@")
            same = str(Path(target.path).stat().st_mtime_ns) == moment
            key = found if same else cachefile.read_header(target.path).key
            if key != "damaged" and not spooled(key).exists():
                SPOOL.mkdir(parents=True, exist_ok=True)
                os.link(target.path, spooled(key))


def _targets(orders: Iterable[Order]) -> Iterator[Target]:
    return (target for order in orders for item in order.items for target in item.targets)


def forget_old(keep: set[str]) -> None:
    """Delete files with another name, and those of a week ago but orders named in `keep`."""
    limit = time.time() - KEPT_SECONDS
    for path in [*FOLDER.glob("*"), *RUNS.glob("*")]:
        with contextlib.suppress(FileNotFoundError):  # another plan may clean up as well
            if path.name.split(".")[0] not in keep and path.stat().st_mtime < limit:
                path.unlink()
    forget_delivered()
    for entry in _entries():
        with contextlib.suppress(OSError):  # a folder that somebody put there
            # By the change time: a file that was kept from being replaced may be older itself.
            if entry.stat().st_ctime < limit:
                Path(entry.path).unlink()


def forget_delivered() -> None:
    """Delete the spooled files that have another name: those of their targets."""
    for entry in _entries():
        with contextlib.suppress(OSError):
            if entry.stat(follow_symlinks=False).st_nlink > 1:
                Path(entry.path).unlink()


def _entries() -> Iterator[os.DirEntry[str]]:
    with contextlib.suppress(FileNotFoundError), os.scandir(SPOOL) as entries:
        yield from entries
