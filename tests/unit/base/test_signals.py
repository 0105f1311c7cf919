"""Signals that end a process end it once, and quietly."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import latentmake

# SIGINT and SIGTERM are both there before Python calls a handler: Ctrl-C, which a build passes on.
TWO = """
import signal
from latentmake.base.signals import signals_call

def act(number):
    called.append(number)
    raise KeyboardInterrupt

called = []
both = {signal.SIGINT, signal.SIGTERM}
try:
    with signals_call(act):
        signal.pthread_sigmask(signal.SIG_BLOCK, both)
        for each in both:
            signal.raise_signal(each)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, both)
except KeyboardInterrupt:
    print(len(called))
"""


def run(code: str) -> tuple[str, str]:
    """Run code in a process of its own; return what it says on stdout and stderr."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(Path(latentmake.__file__).parents[1])},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout, done.stderr


def test_of_two_signals_at_once_the_first_counts_and_nothing_is_said_of_the_other() -> None:
    assert run(TWO) == ("1\n", "")


# A thread gets the signal while the main thread waits for a lock, as Snakemake does for its jobs.
ANOTHER = """
import signal, threading, time
from latentmake.base.signals import signals_call

def send():
    time.sleep(0.2)
    signal.pthread_kill(threading.get_ident(), signal.SIGINT)
    time.sleep(20)

jobs = threading.Semaphore(0)
try:
    with signals_call():
        threading.Thread(target=send, daemon=True).start()
        jobs.acquire(timeout=10)
except KeyboardInterrupt:
    print("at once")
"""


def test_a_signal_that_another_thread_gets_ends_the_wait_of_the_main_thread() -> None:
    began = time.monotonic()
    assert run(ANOTHER) == ("at once\n", "")
    assert time.monotonic() - began < 10
