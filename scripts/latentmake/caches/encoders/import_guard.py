"""Imports without what they bring along and nobody needs.

diffusers imports transformers, peft and accelerate wherever they are installed, for adapters and
text encoders. A VAE needs none of them, and a process that only encodes images begins in little
more than half the time without.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["without"]


@contextmanager
def without(*names: str) -> Iterator[None]:
    """Let modules that are not imported yet seem not to be installed.

    For processes that will not need them: what is imported meanwhile may remember it.
    """
    hidden = [name for name in names if name not in sys.modules]
    modules: dict[str, object] = sys.modules  # type: ignore[assignment]
    modules.update(dict.fromkeys(hidden))  # None there: an import fails, a search finds nothing
    try:
        yield
    finally:
        for name in hidden:
            del modules[name]
