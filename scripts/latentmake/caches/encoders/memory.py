"""Memory of a CPU's tensors, kept for the next ones."""

from __future__ import annotations

import ctypes
import platform

# Source: malloc.h and mallopt(3) of glibc, which takes no larger threshold for memory of its own.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
_KEPT = {_M_MMAP_THRESHOLD: 32 << 20, _M_TRIM_THRESHOLD: 256 << 20, _M_TOP_PAD: 16 << 20}  # bytes


def keep_memory() -> None:
    """Let glibc keep freed memory, up to 256 MiB a thread, where it is the system's library.

    It gives a tensor of some megabytes back to the system when it is freed, which must clear the
    memory of the next one: a tenth of the time of encoding small pictures.
    """
    if platform.libc_ver()[0] == "glibc":
        library = ctypes.CDLL(None)
        for option, value in _KEPT.items():
            library.mallopt(option, value)
