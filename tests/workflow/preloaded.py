"""A process that has imported torch, transformers and diffusers, and forks for a build's scripts.

Importing them takes a job seven times as long as encoding a few tiny pictures. Here a job runs the
same script in a copy of a process that has done that already; nothing else of it differs. For tests
that are not about processes, signals or imports.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

VARIABLE = "LATENTMAKE_PRELOADED"
SITE = Path(__file__).with_name("preload")


def environment() -> dict[str, str]:
    """Return what makes scripts of a build run in copies of that process; start it if need be."""
    return {VARIABLE: _started(), "PYTHONPATH": str(SITE)}


@functools.cache
def _started() -> str:
    place = str(Path(tempfile.mkdtemp(prefix="latentmake-")) / "socket")
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    server = subprocess.Popen(
        [sys.executable, __file__, place],
        env={**kept, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        start_new_session=True,
    )
    atexit.register(server.kill)
    while not Path(place).exists():
        if server.poll() is not None:
            raise RuntimeError("the process that imports ended")
        time.sleep(0.02)
    return place


def main(place: str) -> None:
    """Import, wait for scripts, and run one: only a copy of this process gets beyond `_served`."""
    import diffusers
    import snakemake.script
    import transformers

    for name in ("CLIPTextModel", "CLIPTextModelWithProjection", "T5EncoderModel"):
        getattr(transformers, name)
    getattr(diffusers, "AutoencoderKL")  # noqa: B009 -- imported when it is looked for
    del snakemake
    script = _served(place)
    sys.argv = [script]
    sys.path[0] = str(Path(script).parent)
    runpy.run_path(script, run_name="__main__")


def _served(place: str) -> str:
    parent = os.getppid()
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    server.bind(f"{place}.new")
    server.listen(16)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    Path(f"{place}.new").rename(place)
    while os.getppid() == parent:
        if not select.select([server], [], [], 1)[0]:
            continue
        connection, _ = server.accept()
        if os.fork() == 0:
            server.close()
            return _run(connection)
        connection.close()
    os._exit(0)


def _run(connection: socket.socket) -> str:
    """Take a script's place in a copy; this process waits for it and tells how it ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    length, files, _, _ = socket.recv_fds(connection, 8, 3)
    data = b""
    while len(data) < int.from_bytes(length, "little"):
        data += connection.recv(1 << 16)
    script, folder, variables, mask = json.loads(data.decode("utf-8", "surrogateescape"))
    job = os.fork()
    if job:
        waiting = os.pidfd_open(job)
        ready, _, _ = select.select([waiting, connection], [], [])
        if waiting not in ready:  # whoever asked is gone
            os.kill(job, signal.SIGKILL)
        _, status = os.waitpid(job, 0)
        with contextlib.suppress(OSError):
            connection.sendall(status.to_bytes(8, "little"))
        os._exit(0)
    connection.close()
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.chdir(folder)
    os.umask(mask)
    os.environ.clear()
    os.environ.update(variables)
    for name in (VARIABLE, "PYTHONPATH"):  # which no user sets
        os.environ.pop(name, None)
    return str(script)


if __name__ == "__main__":
    main(sys.argv[1])
