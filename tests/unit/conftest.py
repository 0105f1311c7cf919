"""What unit tests share."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def working(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A new folder, which is the working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path
