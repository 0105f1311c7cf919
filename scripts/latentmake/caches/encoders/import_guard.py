"""Imports without optional dependencies.

diffusers imports transformers, peft and accelerate wherever they are installed. A VAE needs none of
them, and a process that only encodes images starts in little more than half the time without.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["without"]


@contextmanager
def without(*names: str) -> Iterator[None]:
    """Hide modules that are not imported yet, as if they were not installed.

    For processes that never need them: modules imported meanwhile may remember their absence.
    """
    hidden = [name for name in names if name not in sys.modules]
    modules: dict[str, object] = sys.modules  # type: ignore[assignment]
    modules.update(dict.fromkeys(hidden))  # None there: an import fails, a search finds nothing
    try:
        yield
    finally:
        for name in hidden:
            del modules[name]
