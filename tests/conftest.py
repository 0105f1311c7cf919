"""What all tests share."""

from __future__ import annotations

import os

# Before anything imports torch: tests run side by side, and threads that wait actively would halve
# the speed of everything beside them.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
