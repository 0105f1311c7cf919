"""The measurements of a GPU: each step works at tiny sizes on a CPU, and none stops the others."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

BENCH = Path(__file__).parents[1] / "bench"
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def _importable() -> Iterator[None]:
    sys.path.insert(0, str(BENCH))
    yield
    sys.path.remove(str(BENCH))


@pytest.fixture
def gpu(_importable: None) -> ModuleType:
    import gpu

    return gpu


def step(gpu: ModuleType, name: str, code: str, limit: int = 60) -> object:
    return gpu.Step(name, limit, lambda cpu, rows: ["-c", code, rows])


def test_steps_that_fail_or_take_too_long_are_told_and_stop_no_other(
    gpu: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = "import pathlib, sys; pathlib.Path(sys.argv[1]).write_text('[{\"images /s\": 3}]')"

    def measured(cpu: bool, rows: str) -> list[str]:
        Path(rows).write_text('[{"images /s": 3}]')  # by itself it may not come to that in time
        return ["-c", "import time; time.sleep(100)"]

    steps = (
        step(gpu, "lacking", "import nothing_of_this_name"),
        gpu.Step("slow", 1, measured),
        step(gpu, "good", f"{rows}; print('all is well')"),
        step(gpu, "unasked", "print(1)"),
    )
    monkeypatch.setattr(gpu, "STEPS", steps)
    named = ["lacking", "slow", "good"]
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--cpu", "--out", str(tmp_path), *named])
    assert gpu.main() == 1
    found = {
        each["step"]: each for each in json.loads((tmp_path / "gpu.json").read_text())["steps"]
    }
    assert list(found) == named
    assert found["lacking"]["status"] == "failed (1): No module named 'nothing_of_this_name'"
    assert found["slow"]["status"] == "stopped after 1 s"
    assert found["slow"]["rows"] == [{"images /s": 3}]  # what was measured until then
    assert found["good"]["status"] == "ok" and found["good"]["rows"] == [{"images /s": 3}]
    printed = (tmp_path / "gpu.txt").read_text()
    assert "all is well" in printed and "1 of 3 steps done" in printed


def test_steps_for_which_no_time_is_left_are_told(
    gpu: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "STEPS", (step(gpu, "late", "print(1)"),))
    monkeypatch.setattr(sys, "argv", ["gpu", "--cpu", "--minutes", "0.01", "--out", str(tmp_path)])
    assert gpu.main() == 1
    assert "late: left out: no time" in (tmp_path / "gpu.txt").read_text()


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_machine_without_a_gpu_is_told_in_one_line(tmp_path: Path) -> None:
    done = subprocess.run(
        [BENCH / "gpu.sh", "--out", tmp_path],
        env={"PATH": "/usr/bin:/bin", "LATENTMAKE_PYTHON": sys.executable},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("no GPU: ") and done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["vae512", "wan", "t5", "clip", "exactness"])
def test_each_step_of_encoders_works(
    _importable: None, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import gpu_encoders

    gpu_encoders.run(name, cpu=True, path=tmp_path / "rows.json")
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert rows
    for row in rows:
        if name == "exactness":
            errors = {"float32": 1e-3, "bfloat16": 0.1, "float16": 0.01}
            assert 0 < row["noise"] < errors[row["dtype"]]
        else:
            assert row["bare /s"] > 0 and row["bare / job"] > 0


def test_the_step_of_the_trainer_works(
    _importable: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import gpu_trainers

    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "NO")
    first, second = gpu_trainers.rows(True, CPU, tmp_path)
    assert first["trainer / bare loop"] > 0
    assert "fault" not in first and ("bitsandbytes" in second.get("fault", "bitsandbytes"))


@pytest.mark.parametrize("name", ["wan_trainer", "loader"])
def test_each_other_step_works(
    gpu: ModuleType, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import runpy

    (found,) = (each for each in gpu.STEPS if each.name == name)
    script, *arguments = found.command(True, str(tmp_path / "rows.json"))
    monkeypatch.setattr(sys, "argv", [script, *arguments])
    runpy.run_path(script, run_name="__main__")
    assert (tmp_path / "rows.json").exists() == found.rows
