"""Mistakes of a user: one line each."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from latentmake.base.errors import UserError


def refused(
    call: Callable[[], object], begin: object = "", kind: type[UserError] = UserError
) -> str:
    """Return the line in which a call is refused: what, where, and how to repair it."""
    with pytest.raises(kind) as caught:
        call()
    line = str(caught.value)
    assert line.startswith(f"{begin}: " if begin else "")
    assert "\n" not in line
    assert "; " in line
    return line
