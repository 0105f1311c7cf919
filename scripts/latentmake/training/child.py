"""A child process of a job: `latentmake.training.run`, with the environment of the job."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import latentmake
from latentmake.caches import gpu
from latentmake.errors import TrainingError
from latentmake.training import process

RUN = ("-m", "latentmake.training.run")
"""Arguments of Python before the path of an order and what to do with it."""


def _environment(threads: int) -> dict[str, str]:
    """Return the environment of a child that computes with a number of threads."""
    package = str(Path(latentmake.__file__).resolve().parent.parent)
    path = os.environ.get("PYTHONPATH")
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([package, path] if path else [package]),
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": str(threads),
        # Threads that wait by spinning starve each other where cores are shared.
        "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "PASSIVE"),
        "TOKENIZERS_PARALLELISM": "false",
    }


def run_child(
    command: Sequence[str],
    *,
    run: str,
    folder: Path,
    threads: int,
    log: Path,
    online: bool,
    gpus: int = 1,
) -> None:
    """Run a command whose mistakes are told by `process.say_error`.

    Args:
        command: Python with `RUN`, perhaps behind a launcher.
        run: name of the run, for messages.
        folder: of the run, for a file of a moment.
        threads: number of threads that it computes with.
        log: its output is appended here.
        online: whether it may ask the hub.
        gpus: how many it uses, where there are any; see `gpu.hold`.

    Raises:
        TrainingError: it failed; one line.
    """
    folder.mkdir(parents=True, exist_ok=True)
    told = {**_environment(threads), **({} if online else {"HF_HUB_OFFLINE": "1"})}
    # One file for all processes of a training: of the same error that each of them has, one line.
    with (
        gpu.hold(gpus, f"run {run}", partial(say, log)),
        tempfile.NamedTemporaryFile(dir=folder, prefix=".error-") as file,
    ):
        told |= gpu.chosen()
        told[process.ERROR] = str(Path(file.name).absolute())
        status, output = process.run(command, environment=told, log=log)
        error = Path(file.name).read_text(encoding="utf-8", errors="replace").strip()
    if status != 0:
        raise TrainingError(
            f"run {run}: {error or process.last_error(output, status)}", hint=f"all output: {log}"
        )


def say(log: Path, text: str) -> None:
    """Say a line to the user, and append it to a log."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
    with log.open("a", encoding="utf-8", errors="backslashreplace") as file:
        file.write(f"{text}\n")
