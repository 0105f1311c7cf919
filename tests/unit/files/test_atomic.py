"""A name never stands for half a file, whatever ends its writer."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

CODE = """
import resource, signal, sys
from pathlib import Path
from latentmake.files import atomic
signal.signal(signal.SIGXFSZ, signal.SIG_IGN if sys.argv[1] == "refused" else signal.SIG_DFL)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))  # the kernel stops a write at this byte
if sys.argv[2] == "write":
    atomic.write("cache/a", b"new" * 100, b"new" * 1000)
else:
    with atomic.replacing(Path("cache/a")) as new:
        new.write_bytes(b"new" * 1000)
"""


@pytest.mark.parametrize("old", [None, b"old"])
@pytest.mark.parametrize("way", ["write", "replacing"])
@pytest.mark.parametrize("end", ["refused", "killed"])
def test_a_write_that_stops_halfway_leaves_what_was_there(
    end: str, way: str, old: bytes | None, tmp_path: Path
) -> None:
    place = tmp_path / "cache/a"
    place.parent.mkdir()
    if old:
        place.write_bytes(old)
    done = subprocess.run(
        [sys.executable, "-c", CODE, end, way], cwd=tmp_path, capture_output=True, check=False
    )
    assert done.returncode == (-signal.SIGXFSZ if end == "killed" else 1), done.stderr
    assert (place.read_bytes() if place.exists() else None) == old
    left = {path.name for path in place.parent.iterdir()} - {"a"}
    assert len(left) == (end == "killed") and all(".latentmake-partial" in x for x in left)
