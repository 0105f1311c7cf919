"""Hands a build's script to a process that has imported its libraries already; see preloaded.py."""

import os
import sys

_SOCKET = "LATENTMAKE_PRELOADED"
_CODE = "# preloaded"  # how code begins that the other process may do

_MODULES = (
    "snakemake",
    "accelerate.commands.launch",
    "latentmake.training.loop.quiet_launch",
    "latentmake.training.sd.train",
    "latentmake.training.sd.decode",
    "latentmake.training.wan.train",
    "latentmake.training.wan.decode",
    "latentmake.training.wan.generate",
    "latentmake.training.wan.evaluate",
)


def _hand_over(place: str, command: list[str]) -> None:
    import json
    import signal
    import socket

    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(place)
    except OSError:
        return  # nobody is there: this process does it
    task = [command, os.getcwd(), dict(os.environ), os.umask(0)]
    os.umask(task[3])
    data = json.dumps(task).encode("utf-8", "surrogateescape")
    socket.send_fds(connection, [len(data).to_bytes(8, "little")], [0, 1, 2])
    connection.sendall(data)
    status = connection.recv(8)  # of os.waitpid; nothing where that process is gone
    code = int.from_bytes(status, "little") if len(status) == 8 else 1 << 8
    if os.WIFSIGNALED(code):
        signal.signal(os.WTERMSIG(code), signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(code))
    os._exit(os.WEXITSTATUS(code))


def _command() -> list[str] | None:
    """Return what this process was called with, where the other one can do it."""
    match sys.orig_argv[1:]:
        case [script] if "/.snakemake/scripts/" in script:
            return [script]
        case ["-m", module, *_] if module in _MODULES:
            return sys.orig_argv[1:]
        case ["-c", code, *_] if code.startswith(_CODE):
            return sys.orig_argv[1:]
    return None


if os.environ.get(_SOCKET) and (command := _command()):
    _hand_over(os.environ[_SOCKET], command)
