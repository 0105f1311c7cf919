"""Progress: a bar on a terminal, a line every 30 s elsewhere.

In a log file or a scheduler's output, a bar that is redrawn gives hundreds of useless lines.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

_SECONDS = 30.0  # seconds between two lines
_DELAY = 1.0  # seconds before a bar is drawn
_LINE = "{desc}: {n_fmt} of {total_fmt}, {rate_noinv_fmt}, {remaining} left{postfix}"
_TERMINAL = "LATENTMAKE_TERMINAL"

if TYPE_CHECKING:
    _Bar = tqdm[Any]
else:
    _Bar = tqdm


def _on_terminal() -> bool:
    return sys.stderr.isatty() or os.environ.get(_TERMINAL) == "1"


def environment() -> dict[str, str]:
    """Return environment variables for a child process whose output is piped to this stderr.

    They tell the child that the output ends at a terminal; otherwise they slow down any tqdm bar.
    """
    if _on_terminal():
        return {_TERMINAL: "1"}
    seconds = str(_SECONDS)
    return {"TQDM_MININTERVAL": seconds, "TQDM_MAXINTERVAL": seconds, "TQDM_MINITERS": "1"}


def say(text: str) -> None:
    """Print a line for the user, above a progress bar."""
    Progress.write(text, file=sys.stderr)


class _Log:
    """File object that writes each state of a bar to stderr as a line of its own."""

    def write(self, text: str) -> None:
        """Write a state of the bar as a line; drop the cursor movements of tqdm."""
        if (line := text.strip()) and not line.startswith("\x1b"):
            sys.stderr.write(f"{line}\n")

    def flush(self) -> None:
        """Flush stderr."""
        sys.stderr.flush()


class Progress(_Bar):
    """tqdm's bar on a terminal; elsewhere a line every 30 s, and no line for shorter work.

    Several threads may update it.

    Attributes:
        status: function that returns text for the end of the bar or line each time it is drawn.
    """

    status: Callable[[], str] | None = None

    def __init__(self, *args: Any, **options: Any) -> None:
        self._updating = threading.Lock()
        if _on_terminal():
            options = {"delay": _DELAY} | options
        else:
            options |= {
                "file": _Log(),
                "mininterval": _SECONDS,
                "miniters": 1,
                "delay": _SECONDS,
                "leave": False,
                "bar_format": _LINE,
                "unit": f" {options.get('unit', 'it')}",
            }
        super().__init__(*args, **options)

    def update(self, n: float | None = 1) -> bool | None:
        """Count further steps, under a lock, because tqdm itself takes none."""
        with self._updating:
            return super().update(n)

    def display(self, msg: str | None = None, pos: int | None = None) -> Any:
        """Draw the bar or line."""
        if self.status is not None and msg is None:
            self.set_postfix_str(self.status(), refresh=False)
        return super().display(msg, pos)
