"""What tests of the trainer `wan` share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from accelerate.state import AcceleratorState


@pytest.fixture(autouse=True)
def _own_precision() -> Iterator[None]:
    """Forget the number format, which accelerate keeps for a whole process."""
    AcceleratorState._reset_state(True)
    yield
    AcceleratorState._reset_state(True)
