"""Each job gets a GPU for itself, and gives it back however it ends."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from pathlib import Path

import pytest
from latentmake import devices

PACKAGE = str(Path(devices.__file__).parents[1])
HOLD = """
import sys, time
sys.path.insert(0, {package!r})
from latentmake.devices import lease
with lease() as device:
    print(device, flush=True)
    time.sleep(60)
"""


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HIP_VISIBLE_DEVICES", raising=False)


def hold() -> tuple[subprocess.Popen[str], str]:
    """Start a process that leases a GPU; return it and what it got."""
    code = HOLD.format(package=PACKAGE)
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


@pytest.mark.parametrize(
    ("value", "expected"),
    [("0,2", ["0", "2"]), ("", []), ("-1", []), ("GPU-a, GPU-b", ["GPU-a", "GPU-b"])],
)
def test_the_environment_says_which_gpus_there_are(
    value: str, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    assert devices.visible() == expected


def test_jobs_side_by_side_get_different_gpus_and_a_killed_one_gives_its_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5,7")
    held = [hold() for _ in range(3)]
    try:
        assert sorted(name for _, name in held) == ["3", "5", "7"]
        killed, free = held[1]
        killed.kill()
        killed.wait()
        with devices.lease() as name:
            assert name == free
            assert os.environ["CUDA_VISIBLE_DEVICES"] == free
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "3,5,7"
    finally:
        for process, _ in held:
            process.kill()
            process.wait()


def test_a_job_waits_where_all_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    held = [hold(), hold()]
    code = HOLD.format(package=PACKAGE)
    waiting = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert waiting.stdout is not None
        assert not select.select([waiting.stdout], [], [], 1.5)[0]
        held[0][0].kill()
        assert waiting.stdout.readline().strip() == held[0][1]
    finally:
        for process in (waiting, held[0][0], held[1][0]):
            process.kill()
            process.wait()


@pytest.mark.parametrize(("value", "expected"), [("4", "4"), ("", None)])
def test_one_gpu_or_none_needs_no_lock(
    value: str, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    with devices.lease() as name, devices.lease() as other:
        assert name == other == expected
    assert not Path(".latentmake").exists()
