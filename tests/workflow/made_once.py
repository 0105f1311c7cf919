"""A folder that one test makes and all use."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """Return a folder that whoever needs it first makes, and that all workers use."""
    root = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent
    folder, whole = root / "shared" / name, root / "shared" / f"{name}.whole"
    folder.parent.mkdir(exist_ok=True)
    with FileLock(root / "shared" / f"{name}.lock"):
        if not whole.exists():
            shutil.rmtree(folder, ignore_errors=True)
            make(folder)
            whole.touch()
    return folder
