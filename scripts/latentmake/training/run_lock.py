"""Lock of a run, for two trainings must not write the same checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from latentmake.errors import TrainingError
from latentmake.files.locks import Lock


@contextmanager
def run_lock(folder: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Hold the lock of a run's folder until its training has ended; raises TrainingError."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = Lock(folder / ".training.lock", "training")
    try:
        free = lock.acquire()
    except OSError as error:
        say(f"warning: {lock.path}: {error.strerror}: begin no second training of this run")
        free = True
    if not free:
        raise TrainingError(
            f"another training of this run is running: {lock.holder()}",
            where=folder,
            hint="wait until it ends, or stop it",
        )
    with closing(lock):
        yield
