"""Progress: a bar on a terminal, a line every 30 s elsewhere.

A bar redrawn in a log file or in a scheduler's output is hundreds of lines that nobody reads.
"""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

_SECONDS = 30.0  # between two lines
_LINE = "{desc}: {n_fmt} of {total_fmt}, {rate_noinv_fmt}, {remaining} left{postfix}"
_TERMINAL = "LATENTMAKE_TERMINAL"

if TYPE_CHECKING:
    _Bar = tqdm[Any]
else:
    _Bar = tqdm


def _on_terminal() -> bool:
    return sys.stderr.isatty() or os.environ.get(_TERMINAL) == "1"


def duration(minutes: float) -> str:
    """Return a time for people: `40 s`, `25 min`, `3.5 h`."""
    if minutes < 1:
        return f"{max(1, round(minutes * 60))} s"
    return f"{round(minutes)} min" if minutes < 120 else f"{minutes / 60:.1f} h"


def environment() -> dict[str, str]:
    """Return variables for a child process whose output is piped to this stderr.

    They say whether it ends at a terminal; where not, they slow down any tqdm bar.
    """
    if _on_terminal():
        return {_TERMINAL: "1"}
    seconds = str(_SECONDS)
    return {"TQDM_MININTERVAL": seconds, "TQDM_MAXINTERVAL": seconds, "TQDM_MINITERS": "1"}


def say(text: str) -> None:
    """Say a line to the user, above a progress bar."""
    Progress.write(text, file=sys.stderr)


class Progress(_Bar):
    """tqdm's bar on a terminal; elsewhere a line every 30 s, none in the first 30.

    Several threads may update it.

    Attributes:
        status: returns words for the end of the bar or line, whenever that is drawn.
    """

    status: Callable[[], str] | None = None

    def __init__(self, *args: Any, **options: Any) -> None:
        self._updating = threading.Lock()
        self._lines = not _on_terminal()
        self._due = time.monotonic() + _SECONDS
        if self._lines:
            options |= {
                "mininterval": _SECONDS,
                "maxinterval": _SECONDS,
                "miniters": 1,
                "delay": _SECONDS,
                "leave": False,
                "bar_format": _LINE,
                "unit": f" {options.get('unit', 'it')}",
            }
        super().__init__(*args, **options)

    def update(self, n: float | None = 1) -> bool | None:
        """Count further steps; tqdm itself takes no lock for that."""
        with self._updating:
            return super().update(n)

    def display(self, msg: str | None = None, pos: int | None = None) -> Any:
        """Draw the bar, or write a line where one is due; return True where something was drawn."""
        now = time.monotonic()
        if self._lines and now < self._due:
            return False
        if self.status is not None:
            self.set_postfix_str(self.status(), refresh=False)
        if not self._lines:
            return super().display(msg, pos)
        self._due = now + _SECONDS
        self.fp.write(f"{self}\n")
        self.fp.flush()
        return True

    def clear(self, nolock: bool = False) -> None:
        """Make room for another line; a line is never taken back."""
        if not self._lines:
            super().clear(nolock)

    def close(self) -> None:
        """End it, without a last line: the job says how it ended."""
        if self._lines:
            self._due = math.inf
        super().close()
