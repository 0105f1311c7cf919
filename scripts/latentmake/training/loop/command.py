"""A training as a process: an order file in, an exit status out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import diffusers

from latentmake.training.command import exit_status
from latentmake.training.loop.accelerator import decided
from latentmake.training.loop.launch import read
from latentmake.training.loop.order import wanted
from latentmake.training.loop.recipe import Recipe
from latentmake.training.loop.sample_images import picture_reasons
from latentmake.training.loop.samples import draw_later
from latentmake.training.loop.train import Training
from latentmake.training.record import RunFiles


def carry_out(arguments: Sequence[str], recipe: type[Recipe]) -> int:
    """Train by the order that a command line names; return the exit status.

    Of a finished training, draw the samples that are missing.
    """
    diffusers.utils.logging.set_verbosity_error()
    return exit_status(lambda: _train(recipe, Path(arguments[0])), recipe.memory_hint)


def _train(recipe: type[Recipe], path: Path) -> None:
    made = recipe(decided(read(path, recipe.order_type)))
    files, want = RunFiles(made.order), wanted(made.order)
    if not files.trained(want):
        Training(made).run()
        return
    if picture_reasons(made.order, want):
        draw_later(made)
