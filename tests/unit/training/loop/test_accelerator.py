"""Processes that train together wait for each other."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from latentmake.config import SdTrainer
from latentmake.errors import DeviceError
from latentmake.training.loop.accelerator import make_accelerator

SCRIPTS = Path(__file__).parents[4] / "scripts"
# One process of a training on several devices, with torch's process group for CPUs.
SCRIPT = """
import torch
from latentmake.config import SdTrainer
from latentmake.training.loop.accelerator import make_accelerator
accelerator = make_accelerator(SdTrainer(kind="sd"), "sd")
assert accelerator.distributed_type.value == "MULTI_CPU"
backend = torch.distributed.group.WORLD._get_backend(torch.device("cpu"))
print(backend.options._timeout.total_seconds())
"""


def test_processes_wait_for_the_samples_of_the_first_longer_than_any_take() -> None:
    launched = {
        **{"ACCELERATE_USE_CPU": "true", "PYTHONPATH": str(SCRIPTS), "OMP_NUM_THREADS": "1"},
        **{"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"},
        **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"},
    }
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={**os.environ, **launched},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert timedelta(seconds=float(done.stdout)) >= timedelta(days=1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch sees a GPU")
def test_a_gpu_that_torch_does_not_see_is_refused_before_anything_is_trained(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    with pytest.raises(DeviceError, match=r"GPU 3: torch .* does not see it"):
        make_accelerator(SdTrainer(kind="sd"), "sd")
