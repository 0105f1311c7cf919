"""Signals that end a process end it once, and quietly."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import latentmake

# SIGINT and SIGTERM are both there before Python calls a handler: Ctrl-C, which a build passes on.
TWO = """
import signal
from latentmake.files.watchdog import signals_call

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


def test_of_two_signals_at_once_the_first_counts_and_nothing_is_said_of_the_other() -> None:
    done = subprocess.run(
        [sys.executable, "-c", TWO],
        env={**os.environ, "PYTHONPATH": str(Path(latentmake.__file__).parents[1])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.stdout, done.stderr) == ("1\n", "")
