"""Number of cores that this process may use."""

from __future__ import annotations

import os


def usable_cores() -> int:
    """Return the number of cores that this process may use; a cluster's job gets only some.

    macOS does not tell; there it is the number of all cores.
    """
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
