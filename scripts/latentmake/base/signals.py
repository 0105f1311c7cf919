"""Signals that end a process: the first one calls a function, in the main thread, at once.

Python runs handlers in the main thread. If that waits for a lock, and the system gave the signal to
another thread, the handler would run when the wait has ended: after a training of many hours.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Ctrl-C, `kill`, and a closed terminal."""

_WAKES = signal.SIGURG  # a signal that processes ignore unless they have a handler for it

_acts: list[Callable[[int], object]] = []
"""Functions of the nested `signals_call` contexts that are active, the innermost last."""


def _interrupt(_number: int) -> None:
    raise KeyboardInterrupt


@contextmanager
def signals_call(act: Callable[[int], object] = _interrupt) -> Iterator[None]:
    """Let the first of `SIGNALS` call a function; outside the main thread this does nothing.

    By default the function raises KeyboardInterrupt, so that half-written files are removed. If
    contexts are nested, the function of the innermost one is called. Later signals are ignored
    until the outermost context ends, because a Ctrl-C may arrive as two signals. A signal that was
    ignored before stays ignored: `nohup` ignores SIGHUP.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    is_outermost = not _acts
    with _acting(act):  # before the handlers are there, which call it
        if not is_outermost:
            yield
            return
        before = {}
        try:
            for number in SIGNALS:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    before[number] = signal.signal(number, _handle)
            with _woken():
                yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler if handler is not None else signal.SIG_DFL)


@contextmanager
def _acting(act: Callable[[int], object]) -> Iterator[None]:
    _acts.append(act)
    try:
        yield
    finally:
        _acts.remove(act)


def _handle(number: int, _frame: FrameType | None) -> None:
    for other in SIGNALS:
        if signal.getsignal(other) is _handle:
            # With SIG_IGN, Python would print a message about a signal that came before.
            signal.signal(other, lambda *_: None)
    if _acts:
        _acts[-1](number)


@contextmanager
def _woken() -> Iterator[None]:
    """Wake the main thread whenever a signal has come, whichever thread got it."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    main = threading.get_ident()

    def wake() -> None:
        while number := os.read(reading, 1):
            if number[0] != _WAKES:
                signal.pthread_kill(main, _WAKES)
        os.close(reading)

    waker = threading.Thread(target=wake, daemon=True)
    before = signal.signal(_WAKES, lambda *_: None)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    try:
        waker.start()
        yield
    finally:
        signal.set_wakeup_fd(-1)
        os.close(writing)
        if waker.is_alive():  # a signal may have come while it was started
            waker.join()
        signal.signal(_WAKES, before if before is not None else signal.SIG_DFL)
