"""Logs of jobs, and one line for a user's mistake, for the Snakefile and all in `scripts/`."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

from latentmake.errors import UserError, system_error

TOLD_AT_THE_END = "LATENTMAKE_TOLD_AT_THE_END"
"""Environment variable of jobs whose errors are the last lines of a build: they only log them."""


@contextlib.contextmanager
def logged(log: str) -> Iterator[Callable[[str], None]]:
    """Yield a function that prints a line above any progress bar and into a job's log.

    A user's mistake ends the process with one line and status 1; a fault of ours with a traceback,
    in the log as well. SIGTERM and SIGHUP end it as Ctrl-C does.
    """
    from latentmake.files.signals import signals_call
    from latentmake.progress import Progress

    path = Path(log)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab", buffering=0) as file:  # a buffer would fail again on a full disk

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
            known = system_error(error) if isinstance(error, OSError) else error
            told = known if isinstance(known, UserError) else None
            say(f"error: {told}" if told else traceback.format_exc())
            sys.exit(1)
        finally:
            gc.freeze()  # or the end of the process searches all that it imported, for a second


@contextlib.contextmanager
def exit_on_mistake() -> Iterator[None]:
    """End the program with one line at a user's mistake, or where the system refuses a call."""
    try:
        yield
    except UserError as error:
        sys.exit(f"error: {error}")
    except OSError as error:
        if known := system_error(error):
            sys.exit(f"error: {known}")
        raise
