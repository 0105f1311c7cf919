"""A process of a training, of clips or of an evaluation: an order file in, an exit status out.

`python -m latentmake.training.run ORDER train` trains, perhaps behind `accelerate launch`;
`generate` and `evaluate` in the place of `train` draw clips, and evaluate held-out items.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import diffusers

from latentmake.errors import TrainingError, UserError, is_out_of_memory, storage_error
from latentmake.files.signals import signals_call
from latentmake.training.loop import draw
from latentmake.training.loop.launch import order_of, read
from latentmake.training.loop.order import wanted
from latentmake.training.loop.plan import LoopBackend
from latentmake.training.loop.recipe import decided
from latentmake.training.loop.train import Training
from latentmake.training.order import RunFiles
from latentmake.training.process import say_error, tell

_HINTS = {
    "generate": "lower generate.frames or generate.resolution, or end other programs",
    "evaluate": "set the run's `validation.clips` to 0, or end other programs",
}


def _in_thread(failed: threading.ExceptHookArgs) -> None:
    """Print the traceback of a thread; TensorBoard's hands faults of the disk to the main one."""
    if not isinstance(failed.exc_value, OSError):
        threading.__excepthook__(failed)


def main(arguments: Sequence[str]) -> int:
    """Carry out an order; tell a user's mistake in a line, and return the exit status."""
    from latentmake import backends  # whose modules are above this folder's

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
            elif not RunFiles(training).trained(wanted(training)):
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
        known = storage_error(error, error.filename or place)
        if known is None:
            raise
        say_error(known)
        return 1
    except KeyboardInterrupt as stopped:
        tell(str(stopped))
        return 130
    return 0


if __name__ == "__main__":
    status = main(sys.argv[1:])
    gc.freeze()  # or the end of the process searches all that it imported, for a second
    sys.exit(status)
