"""Process that carries out the order of a training, of clips or of an evaluation.

`python -m latentmake.trainers.run ORDER train` trains, perhaps behind `accelerate launch`. With
`generate` instead of `train` it draws clips, and with `evaluate` it evaluates held-out items.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import diffusers

from latentmake.base.errors import TrainingError, UserError, is_out_of_memory, storage_error
from latentmake.base.signals import signals_call
from latentmake.runs.order import RunFiles
from latentmake.trainers.loop import draw
from latentmake.trainers.loop.launch import order_of, read
from latentmake.trainers.loop.plan import LoopBackend
from latentmake.trainers.loop.recipe import decided
from latentmake.trainers.loop.train import Training
from latentmake.trainers.process import say_error, tell

_HINTS = {
    "generate": "lower generate.frames or generate.resolution, or end other programs",
    "evaluate": "set the run's `validation.clips` to 0, or end other programs",
}


def _in_thread(failed: threading.ExceptHookArgs) -> None:
    """Print the traceback of a thread, unless it is an OSError.

    TensorBoard's thread passes errors of the disk on to the main thread, which reports them.
    """
    if not isinstance(failed.exc_value, OSError):
        threading.__excepthook__(failed)


def main(arguments: Sequence[str]) -> int:
    """Carry out an order, report a user's mistake in one line, and return the exit status."""
    from latentmake import backends  # here, because `backends` imports this folder

    path, word = Path(arguments[0]), arguments[1]
    place, threading.excepthook = path, _in_thread
    diffusers.utils.logging.set_verbosity_error()
    try:
        with signals_call():
            backend = backends.of_order(path)
            assert isinstance(backend, LoopBackend)
            hint = _HINTS.get(word) or backend.memory_hint
            order = None if word == "train" else order_of(path, word)
            training = decided(read(Path(order.training) if order else path, backend.order_type))
            place, recipe = Path(training.output), backend.recipe(training)
            if order is not None:
                draw.follow(order, recipe)
            elif not RunFiles(training).trained(training.wanted()):
                Training(recipe).run()
    except UserError as error:
        say_error(error)
        return 1
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, RuntimeError) and not is_out_of_memory(str(error)):
            raise
        say_error(TrainingError("the device is out of memory", hint=hint))
        return 1
    except OSError as error:
        fault = storage_error(error, error.filename or place)
        if fault is None:
            raise
        say_error(fault)
        return 1
    except KeyboardInterrupt as stopped:
        if line := str(stopped):  # only the main process has one; the file is that of all
            tell(line)
        return 130
    return 0


if __name__ == "__main__":
    status = main(sys.argv[1:])
    # Otherwise the garbage collector searches all imported objects at exit, for a second.
    gc.freeze()
    sys.exit(status)
