"""Natural order of names: `line 9` before `line 10`."""

from __future__ import annotations

import re

__all__ = ["natural_key"]


def natural_key(name: str) -> list[tuple[int, str]]:
    """Return a sort key in which a run of digits counts as a number."""
    parts = re.split(r"([0-9]+)", name)
    return [(int(part), "") if part.isdecimal() else (0, part) for part in parts]
