"""Each job gets a GPU for itself, and gives it back however it ends."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from latentmake.caches import gpu
from latentmake.errors import StorageError

PACKAGE = str(Path(gpu.__file__).parents[2])
HOLD = """
import sys, signal
sys.path.insert(0, {package!r})
from latentmake.caches.gpu import lease

def say(line):
    if line.startswith("waiting"):
        print("waits", flush=True)

with lease(say) as device:
    print(device, flush=True)
    signal.pause()
"""


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.delenv("HIP_VISIBLE_DEVICES", raising=False)


def hold() -> tuple[subprocess.Popen[str], str]:
    """Start a process that leases a GPU until it is killed; return it and what it said first."""
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
    assert gpu.visible() == expected


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
        with gpu.lease() as name:
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
    waiting, said = hold()
    try:
        assert said == "waits"
        assert waiting.stdout is not None
        held[0][0].kill()
        assert waiting.stdout.readline().strip() == held[0][1]
    finally:
        for process in (waiting, held[0][0], held[1][0]):
            process.kill()
            process.wait()


@pytest.mark.parametrize(("value", "expected"), [("4", "4"), ("", None)])
def test_one_gpu_of_unknown_uuid_or_none_needs_no_lock(
    value: str, expected: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    with gpu.lease() as name, gpu.lease() as other:
        assert name == other == expected
    assert not list(tmp_path.iterdir())


def test_a_waiting_job_says_so_whatever_project_holds_the_only_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\necho 'GPU 0: NVIDIA H200 (UUID: GPU-0a1b-2c)'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    process, name = hold()
    assert name == "0"
    said: list[str] = []

    def say(line: str) -> None:
        said.append(line)
        process.kill()

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-0a1b-2c")  # the same one, by its other name
    with gpu.lease(say) as device:
        assert device == "GPU-0a1b-2c"
    process.wait()
    folder = tmp_path / f"latentmake-{os.getuid()}"
    waiting = f"waiting for a GPU: other jobs hold GPU-0a1b-2c ({folder})"
    assert said == [waiting, "GPU: GPU-0a1b-2c"]
    assert folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("kind", ["file", "link", "of another"])
def test_a_folder_of_locks_that_is_not_ours_is_refused(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    folder = tmp_path / f"latentmake-{os.getuid()}"
    if kind == "file":
        folder.touch()
    elif kind == "link":
        folder.symlink_to(tmp_path)
    elif os.geteuid():
        pytest.skip("giving a folder away needs the rights of root")
    else:
        folder.mkdir()
        os.chown(folder, 65534, 65534)
    with (
        pytest.raises(StorageError, match=rf"^{folder}: .*; remove it, or set TMPDIR"),
        gpu.lease(),
    ):
        pass
