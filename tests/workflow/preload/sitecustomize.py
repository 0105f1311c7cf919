"""Hands a build's script to a process that has imported its libraries already; see preloaded.py."""

import os
import sys

_SOCKET = "LATENTMAKE_PRELOADED"
_CODE = "# preloaded"  # how code begins that the other process may do

_MODULES = (
    "latentmake",
    "snakemake",
    "accelerate.commands.launch",
    "latentmake.trainers.run",
)


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
    from hand_over import hand_over

    hand_over(os.environ[_SOCKET], command)
