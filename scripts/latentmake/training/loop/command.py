"""Command line of a training: an order file in, an exit status out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import diffusers
import torch

from latentmake.errors import TrainingError, UserError
from latentmake.training.loop.accelerator import decided
from latentmake.training.loop.order import TrainingOrder
from latentmake.training.loop.recipe import Recipe
from latentmake.training.loop.result import RunFiles, wanted
from latentmake.training.loop.samples import draw_later
from latentmake.training.loop.train import Training
from latentmake.training.order import read_order
from latentmake.training.process import say_error

_Order = TypeVar("_Order", bound=TrainingOrder)


def carry_out(
    arguments: Sequence[str], kind: type[_Order], recipe: Callable[[_Order], Recipe]
) -> int:
    """Train by the order that a command line names, or draw; return the exit status.

    Args:
        arguments: of the command line: the path of an order.
        kind: of the order.
        recipe: makes the recipe of an order.
    """
    diffusers.utils.logging.set_verbosity_error()
    hint = ""
    try:
        made = recipe(decided(read_order(Path(arguments[0]), kind)))
        hint = made.memory_hint
        if RunFiles(made.order).trained(wanted(made.order)):
            draw_later(made)
        else:
            Training(made).run()
    except UserError as error:
        say_error(error)
        return 1
    except torch.OutOfMemoryError:
        say_error(TrainingError("the device is out of memory", hint=hint))
        return 1
    except KeyboardInterrupt:
        return 130
    return 0
