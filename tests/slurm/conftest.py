"""The micro model, made once."""

from __future__ import annotations

from pathlib import Path

import pytest
import world


@pytest.fixture(scope="session")
def micro(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the micro model."""
    folder = tmp_path_factory.mktemp("models") / "micro"
    world.make_model(folder)
    return folder
