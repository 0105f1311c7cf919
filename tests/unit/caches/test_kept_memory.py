"""Freed memory of tensors is kept for the next ones."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[3] / "scripts"
CODE = """
import resource, sys, torch
from latentmake.caches.encoders.memory import keep_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        several = [torch.zeros(3 << 20) for _ in range(3)]  # 12 MiB each
        del several
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

keep_memory()
faults()
print(faults())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc alone can be told so")
def test_the_system_need_not_clear_memory_for_each_tensor() -> None:
    environment = {**os.environ, "PYTHONPATH": str(SCRIPTS)}
    done = subprocess.run(
        [sys.executable, "-c", CODE], env=environment, capture_output=True, text=True, check=True
    )
    # 120,000 pages otherwise, unless something small lies behind the tensors by chance.
    assert int(done.stdout) < 10_000
