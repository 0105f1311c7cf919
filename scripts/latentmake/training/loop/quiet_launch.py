"""`accelerate launch` without a traceback of its own where the training failed.

`python -m latentmake.training.loop.quiet_launch OPTIONS -m MODULE ...`, with accelerate's options.
The training says its error itself; the launchers of accelerate and torch would add theirs.
srun starts the same command on each node: `RANK` among the options stands for the node's number.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable

RANK = "SLURM_NODEID"
"""Environment variable of srun, and the option's value that it replaces."""


def quietly(launch: Callable[[], object]) -> int:
    """Run a launcher, and return the exit status of what it launched."""
    logging.disable(logging.ERROR)  # torch's launcher logs each process that failed
    try:
        launch()
    except subprocess.CalledProcessError as error:
        return _ended(error.returncode)
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        from torch.distributed.elastic.multiprocessing import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

        if isinstance(error, SignalException):
            return 128 + error.sigval
        if not isinstance(error, ChildFailedError):
            raise
        return _ended(error.get_first_failure()[1].exitcode)
    return 0


def _ended(status: int) -> int:
    """Return an exit status; where a signal ended the process, say which."""
    if status >= 0:
        return status
    name = signal.Signals(-status).name
    reason = " (too little memory?)" if name == "SIGKILL" else ""
    sys.stderr.write(f"error: it was killed by {name}{reason}\n")
    return 1


if __name__ == "__main__":
    from accelerate.commands.launch import main

    sys.argv = [os.environ[RANK] if each == RANK else each for each in sys.argv]
    sys.exit(quietly(main))
