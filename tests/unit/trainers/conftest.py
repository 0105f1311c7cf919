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
