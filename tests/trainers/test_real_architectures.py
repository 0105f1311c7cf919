"""musubi-tuner's real caching scripts and dataset classes, on pictures, clips and tiny models.

Each architecture's networks are of its own classes, made small by their constants; no encoder's
call is stood in for.
"""

from __future__ import annotations

import pytest
from conftest import Make
from real_models import WORLDS
from real_project import check

pytestmark = pytest.mark.real_trainer


@pytest.mark.parametrize("name", WORLDS)
def test_real_scripts_make_what_is_stale_and_real_datasets_load_it(
    name: str, make_real: Make
) -> None:
    check(make_real(name))
