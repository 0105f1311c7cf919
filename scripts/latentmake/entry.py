"""Logs of jobs, and one line for a user's mistake, for the Snakefile and the entry scripts."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

from latentmake.base.errors import mistake_of

TOLD_AT_THE_END = "LATENTMAKE_TOLD_AT_THE_END"
"""Environment variable of jobs that only log errors, because the build prints them at its end."""


@contextlib.contextmanager
def logged(log: str) -> Iterator[Callable[[str], None]]:
    """Yield a function that prints a line above any progress bar and writes it to a job's log.

    A user's mistake ends the process with one line and status 1. Any other error ends it with a
    traceback, which goes to the log as well. SIGTERM and SIGHUP end the process as Ctrl-C does.
    """
    from latentmake.base.progress import Progress
    from latentmake.base.signals import signals_call

    path = Path(log)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab", buffering=0) as file:  # on a full disk, a buffer would fail a second time

        def say(line: str) -> None:
            if not (line.startswith("error: ") and TOLD_AT_THE_END in os.environ):
                with contextlib.suppress(OSError):  # the terminal was closed
                    Progress.write(line, file=sys.stderr)
            # A full disk must not hide the message about it.
            with contextlib.suppress(OSError):
                file.write(f"{line}\n".encode("utf-8", "backslashreplace"))

        try:
            with signals_call():
                yield say
        except KeyboardInterrupt as stopped:
            say(str(stopped) or "interrupted: finished files are kept")
            sys.exit(130)
        except Exception as error:
            mistake = mistake_of(error)
            say(f"error: {mistake}" if mistake else traceback.format_exc())
            sys.exit(1)
        finally:
            gc.freeze()  # otherwise exit would collect garbage among all modules for a second


@contextlib.contextmanager
def exit_on_mistake(add_places: Callable[[Exception], None] | None = None) -> Iterator[None]:
    """End the program with one line at a user's mistake, or if the system refuses a call."""
    try:
        yield
    except Exception as error:
        if add_places is not None:
            add_places(error)  # names file and line of the mistake
        if mistake := mistake_of(error):
            sys.exit(f"error: {mistake}")
        raise
