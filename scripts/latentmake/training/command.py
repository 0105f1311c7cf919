"""Exit status of a child process that carries out an order."""

from __future__ import annotations

from collections.abc import Callable

import torch

from latentmake.errors import TrainingError, UserError
from latentmake.training.process import say_error


def exit_status(work: Callable[[], object], memory_hint: str = "end other programs") -> int:
    """Do the work of a process; tell a user's mistake in a line, and return the exit status."""
    try:
        work()
    except UserError as error:
        say_error(error)
        return 1
    except torch.OutOfMemoryError:
        say_error(TrainingError("the device is out of memory", hint=memory_hint))
        return 1
    except KeyboardInterrupt:
        return 130
    return 0
