"""What torch and safetensors do otherwise on a disk: their errors, and their files' rights."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

from safetensors import SafetensorError

from latentmake.errors import StorageError, storage_error

__all__ = ["WRITE_FAULTS", "open_to_group", "write_fault"]

WRITE_FAULTS = (OSError, RuntimeError, SafetensorError)


def write_fault(error: Exception, where: str | os.PathLike[str]) -> StorageError | None:
    """Return the one-line error for a write that failed, or None where the disk is not at fault.

    safetensors says `os error 28`; torch's archive writer says that it failed writing, and no more.
    """
    if isinstance(error, OSError):
        return storage_error(error, where)
    if match := re.search(r"os error (\d+)", str(error)):
        return storage_error(OSError(int(match[1]), ""), where)
    if "failed writing file" in str(error) or "unexpected pos" in str(error):
        return storage_error(OSError(errno.ENOSPC, ""), where)
    return None


def open_to_group(folder: Path, pattern: str = "*") -> None:
    """Give files the rights that the umask says; safetensors lets only their owner read them."""
    umask = os.umask(0)
    os.umask(umask)
    for file in filter(Path.is_file, folder.glob(pattern)):
        file.chmod(0o666 & ~umask)
