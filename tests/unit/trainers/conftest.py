"""What all tests of trainings share."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _own_precision() -> Iterator[None]:
    """Forget the number format, which accelerate keeps for a whole process."""
    yield
    if accelerate := sys.modules.get("accelerate.state"):
        accelerate.AcceleratorState._reset_state(True)


@pytest.fixture(autouse=True)
def _few_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure the loss at both ends of a training 16 times, which is no less than it has items."""
    if module := sys.modules.get("latentmake.trainers.loop.recipe"):
        monkeypatch.setattr(module.Recipe, "probes", 16)
