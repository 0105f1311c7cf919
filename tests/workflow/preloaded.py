"""A process that has imported Snakemake, torch and what builds on it, and forks for a build.

Importing them takes a job seven times as long as encoding a few tiny pictures. Here Snakemake, the
scripts of its jobs and trainings run in copies of a process that has done that already; nothing
else of them differs. For tests that are not about processes, signals or imports.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import json
import os
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path

from filelock import FileLock

VARIABLE = "LATENTMAKE_PRELOADED"
OWNER = "PYTEST_LATENTMAKE"
"""The process whose end ends that process too: the one that was called, of all that test."""

SITE = Path(__file__).with_name("preload")


def environment() -> dict[str, str]:
    """Return what makes scripts of a build run in copies of that process; start it if need be."""
    return {VARIABLE: _started(), "PYTHONPATH": str(SITE)}


@functools.cache
def _started() -> str:
    """Return the place of the one server of this session; whoever needs it first starts it."""
    owner = os.environ.get(OWNER, str(os.getpid()))
    folder = Path(tempfile.gettempdir()) / f"latentmake-tests-{owner}"
    folder.mkdir(mode=0o700, exist_ok=True)
    place = folder / "socket"
    with FileLock(folder / "lock"):
        if not place.exists():
            kept = {name: value for name, value in os.environ.items() if name[:6] != "PYTEST"}
            server = subprocess.Popen(
                [sys.executable, __file__, str(place), owner],
                env={**kept, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
                start_new_session=True,
            )
            while not place.exists():
                if server.poll() is not None:
                    raise RuntimeError("the process that imports ended")
                time.sleep(0.02)
    return str(place)


def main(place: str, owner: int) -> None:
    """Import, wait for commands, and run one: only a copy of this process gets beyond `_served`."""
    import accelerate
    import accelerate.commands.launch
    import diffusers
    import matplotlib.backends.backend_agg
    import matplotlib.figure
    import peft
    import PIL.ImageFont
    import snakemake.cli
    import snakemake.script
    import snakemake.workflow
    import torch.utils.tensorboard
    import transformers

    for name in (
        "CLIPTextModel",
        "CLIPTextModelWithProjection",
        "T5EncoderModel",
        "UMT5EncoderModel",
    ):
        getattr(transformers, name)
    for name in (
        *("AutoencoderKL", "UNet2DConditionModel", "DDPMScheduler", "DDIMScheduler"),
        *("AutoencoderKLWan", "WanTransformer3DModel", "UniPCMultistepScheduler"),
    ):
        getattr(diffusers, name)  # imported when it is looked for
    del accelerate, matplotlib, peft, PIL, torch
    gc.collect()
    gc.freeze()  # no copy looks through what all of them have
    command = _served(place, owner)
    snakemake.workflow.Workflow._rundir = os.getcwd()  # which it notes when it is imported
    status: object = 1
    try:
        _do(command)
        status = None
    except SystemExit as error:
        status = error.code
        if isinstance(status, str):
            print(status, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    # Not by the interpreter's own end, which looks through all that was imported for seconds. The
    # thread that Snakemake would wait for counts a second, for jobs that do not come.
    if command[:2] != ["-m", "snakemake"]:
        threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status if isinstance(status, int) else int(status is not None))


def _do(command: list[str]) -> None:
    """Do what Python does with a command line: a script, or -m and a module."""
    if command[0] == "-m":
        sys.argv = command[1:]
        sys.path[0] = os.getcwd()
        sys.modules.pop("accelerate.commands.launch", None)  # or runpy warns of it
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    elif command[0] == "-c":
        sys.argv = ["-c", *command[2:]]
        exec(command[1], {"__name__": "__main__"})
    else:
        sys.argv = command
        sys.path[0] = str(Path(command[0]).parent)
        runpy.run_path(command[0], run_name="__main__")


def _served(place: str, owner: int) -> list[str]:
    """Fork for each command that somebody asks for, until the owner ends; return it in the copy."""
    ends = os.pidfd_open(owner)
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    server.bind(f"{place}.new")
    server.listen(64)
    Path(f"{place}.new").rename(place)
    polled = select.poll()
    polled.register(ends, select.POLLIN)
    polled.register(server, select.POLLIN)
    jobs: dict[int, tuple[int, socket.socket]] = {}  # by the descriptor of its process
    askers: dict[int, int] = {}  # the process's id, by the descriptor of who asked for it
    while True:
        for descriptor, _ in polled.poll():
            if descriptor == ends:
                shutil.rmtree(Path(place).parent, ignore_errors=True)
                os._exit(0)
            elif descriptor == server.fileno():
                connection, _ = server.accept()
                job = os.fork()
                if job == 0:
                    for each in (server, *(other for _, other in jobs.values())):
                        each.close()
                    return _take_place(connection)
                waiting = os.pidfd_open(job)
                jobs[waiting] = (job, connection)
                askers[connection.fileno()] = job
                polled.register(waiting, select.POLLIN)
                polled.register(connection, 0)  # its end alone: the copy reads what it says
            elif descriptor in jobs:
                job, connection = jobs.pop(descriptor)
                _, status = os.waitpid(job, 0)
                with contextlib.suppress(OSError):
                    connection.sendall(status.to_bytes(8, "little"))
                if askers.pop(connection.fileno(), None):
                    polled.unregister(connection)
                polled.unregister(descriptor)
                os.close(descriptor)
                connection.close()
            elif descriptor in askers:  # who asked is gone
                polled.unregister(descriptor)
                os.kill(askers.pop(descriptor), signal.SIGKILL)


def _take_place(connection: socket.socket) -> list[str]:
    """Take a process's place in a copy, and return its command."""
    length, files, _, _ = socket.recv_fds(connection, 8, 3)
    data = b""
    while len(data) < int.from_bytes(length, "little"):
        data += connection.recv(1 << 16)
    command, folder, variables, mask = json.loads(data.decode("utf-8", "surrogateescape"))
    connection.close()
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.chdir(folder)
    os.umask(mask)
    os.environ.clear()
    os.environ.update(variables)
    further = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[1:1] = [path for path in further if Path(path) != SITE]
    return [str(part) for part in command]


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
