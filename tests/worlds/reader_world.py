"""Functions that processes of `Readers` run; whatever this module imports, they import too."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np


def counting(number: int) -> Iterator[Any]:
    for value in range(number):
        yield None
        yield np.full((2, 3), value)


def dying(number: int) -> Iterator[Any]:
    yield 1
    os.kill(os.getpid(), number)
    yield 2


def facts() -> Iterator[Any]:
    import latentmake.encode.pixels.scaling  # noqa: F401  # what a job runs

    yield os.getpgrp(), sorted({"torch", "pydantic", "snakemake"} & {*sys.modules})


def wrong() -> Iterator[Any]:
    raise ValueError("a fault of ours")
    yield
