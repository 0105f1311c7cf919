"""The clock of a file system, which stands still for some milliseconds at a time."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def await_another_time(path: Path) -> None:
    """Wait until a change of a file would show in its times."""
    before = path.stat().st_ctime_ns
    with tempfile.NamedTemporaryFile(dir=path.parents[1]) as probe:
        while os.stat(probe.name).st_ctime_ns <= before:
            os.utime(probe.name)
