"""Captioners that need packages of `latentmake[captioners]`, which this environment may lack.

`LATENTMAKE_CAPTIONERS` names a folder with the packages of `envs/captioners.lock`, see `.ci/run`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

MODULE = Path(__file__).with_name("test_caption_models.py")
RUN = """
import sys, torchvision_operators
torchvision_operators.declare()
import pytest
sys.exit(pytest.main(["-q", "-n", "0", "-p", "no:cacheprovider", "-rs", sys.argv[1]]))
"""


@pytest.mark.skipif("LATENTMAKE_CAPTIONERS" not in os.environ, reason="no folder of packages")
def test_captioners_that_need_further_packages_pass_the_same_tests(tmp_path: Path) -> None:
    worlds = Path(__file__).parents[2] / "worlds"
    folders = [os.environ["LATENTMAKE_CAPTIONERS"], str(worlds), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(MODULE)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, folders))},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert "SKIPPED" not in done.stdout, done.stdout[-4000:]
