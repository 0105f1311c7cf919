"""The measurements of a GPU: each step works at tiny sizes on a CPU, and none stops the others."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

BENCH = Path(__file__).parents[1] / "bench"


@pytest.fixture(scope="module")
def _importable() -> Iterator[None]:
    sys.path.insert(0, str(BENCH))
    yield
    sys.path.remove(str(BENCH))


def measure(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [BENCH / "gpu.sh", *arguments],
        env={"PATH": "/usr/bin:/bin", "LATENTMAKE_PYTHON": sys.executable},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_machine_without_a_gpu_is_told_in_one_line(tmp_path: Path) -> None:
    done = measure("--out", tmp_path)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("no GPU: ") and done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_step_that_there_is_not_stops_no_other(tmp_path: Path) -> None:
    done = measure("--cpu", "--out", tmp_path, "unknown", "wan_trainer", "loader")
    assert done.returncode == 1 and done.stderr.startswith("failed: unknown is no step"), done
    printed = (tmp_path / "gpu.txt").read_text()
    for name in ("wan_trainer", "loader"):
        assert f"== {name}: status 0\n" in printed, printed
    assert json.loads((tmp_path / "wan_trainer.json").read_text())["training"]


@pytest.mark.parametrize("name", ["vae512", "wan", "t5", "clip"])
def test_each_step_of_encoders_works(_importable: None, name: str, tmp_path: Path) -> None:
    import gpu_encoders

    gpu_encoders.run(name, cpu=True, path=tmp_path / "rows.json")
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert rows and all(row["bare /s"] > 0 and row["bare / job"] > 0 for row in rows)


def test_the_step_of_the_trainer_works(
    _importable: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import gpu_trainers

    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "NO")
    first, second = gpu_trainers.rows(["adamw", "adamw8bit"], True, torch.device("cpu"), tmp_path)
    assert first["trainer / bare loop"] > 0
    assert "fault" not in first and ("bitsandbytes" in second.get("fault", "bitsandbytes"))
