"""Turns of worker threads: several at a time, or one alone."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Turns:
    """Lock that several threads hold at a time, or one alone."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._sharing = 0
        self._is_alone = False

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Hold it beside others; waits for one that is alone, or wants to be."""
        with self._changed:
            self._changed.wait_for(lambda: not self._is_alone)
            self._sharing += 1
        try:
            yield
        finally:
            with self._changed:
                self._sharing -= 1
                self._changed.notify_all()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Hold it alone; waits until nobody else does."""
        with self._changed:
            self._changed.wait_for(lambda: not self._is_alone)
            self._is_alone = True
            self._changed.wait_for(lambda: not self._sharing)
        try:
            yield
        finally:
            with self._changed:
                self._is_alone = False
                self._changed.notify_all()
