"""A process that imports once and forks for each command that others hand over to it.

`started` and `preload/hand_over.py` are the side of those who ask; `served`, `done` and `leave`
that of the process itself. Exit status, output, folder, environment and signals are those of a
process of its own.
"""

from __future__ import annotations

import atexit
import contextlib
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
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock

OWNER = "PYTEST_LATENTMAKE"
"""Variable: the process whose end ends the server: the one that was called, of all that test."""


def started(name: str, python: str, program: str) -> str:
    """Return the socket of a program that calls `served`; whoever needs it first starts it."""
    owner = os.environ.get(OWNER, str(os.getpid()))
    folder = Path(tempfile.gettempdir()) / f"{name}-{owner}"
    folder.mkdir(mode=0o700, exist_ok=True)
    place = folder / "socket"
    with FileLock(folder / "lock"):
        if not place.exists():
            kept = {name: value for name, value in os.environ.items() if name[:6] != "PYTEST"}
            server = subprocess.Popen(
                [python, program, str(place), owner],
                env={**kept, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
                start_new_session=True,
            )
            while not place.exists():
                if server.poll() is not None:
                    raise RuntimeError("the process that imports ended")
                time.sleep(0.02)
    return str(place)


def served(place: str, owner: int) -> list[str]:
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
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.chdir(folder)
    os.umask(mask)
    os.environ.clear()
    os.environ.update(variables)
    sys.dont_write_bytecode = "PYTHONDONTWRITEBYTECODE" in os.environ
    sys.pycache_prefix = os.environ.get("PYTHONPYCACHEPREFIX")
    further = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[1:1] = [path for path in further if not (Path(path) / "hand_over.py").is_file()]
    connection.sendall(os.getpid().to_bytes(8, "little"))
    connection.recv(1)  # the other process passes signals on by now
    connection.close()
    return [str(part) for part in command]


def done(command: list[str], prepare: Callable[[str], None] | None = None) -> int:
    """Do what Python does with a command line; return the exit status.

    Args:
        command: a script, -m and a module, or -c and code; each with its arguments.
        prepare: is called with the script's path, before it runs.
    """
    try:
        _do(command, prepare)
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return error.code or 0
        print(error.code, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        traceback.print_exc()
        return -signal.SIGINT
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def leave(status: int, *, threads: bool = True) -> None:
    """End this copy: not by the interpreter's own end, which looks through all imports for seconds.

    Args:
        status: the exit status; negative for a signal.
        threads: wait for threads.
    """
    if threads:
        threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status & 0xFF)


def _do(command: list[str], prepare: Callable[[str], None] | None) -> None:
    if command[0] == "-m":
        sys.argv = command[1:]
        sys.path[0] = os.getcwd()
        sys.modules.pop("accelerate.commands.launch", None)  # or runpy warns of it
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    elif command[0] == "-c":
        sys.argv = ["-c", *command[2:]]
        sys.path[0] = ""
        exec(command[1], {"__name__": "__main__"})
    else:
        sys.argv = command
        sys.path[0] = str(Path(command[0]).resolve().parent)
        if prepare is not None:
            prepare(command[0])
        runpy.run_path(command[0], run_name="__main__")
