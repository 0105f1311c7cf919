"""Each job gets a GPU for itself, and gives it back however it ends.

What is copied to a device and back is what was given, and a CPU copies nothing.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from latentmake.base.errors import DeviceError, StorageError
from latentmake.commands import doctor
from latentmake.encode import gpu
from latentmake.encode.encoders.device import pick_device, stacked
from latentmake.runs import findings

PACKAGE = str(Path(gpu.__file__).parents[2])
HOLD = """
import sys, signal
sys.path.insert(0, {package!r})
from latentmake.encode.gpu import hold

say = lambda line: print("waits", flush=True) if line.startswith("waiting") else None
with hold({count}, "run cats", say) as device:
    print(device, flush=True)
    signal.pause()
"""
UUIDS = ("GPU-9c", "GPU-0a1b-2c", "GPU-5d")


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    for name in ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)


def install(folder: Path, name: str, *lines: str) -> None:
    """Write a program that prints some lines."""
    program = folder / name
    program.parent.mkdir(exist_ok=True)
    program.write_text("#!/bin/sh\n" + "".join(f"echo '{line}'\n" for line in lines))
    program.chmod(0o755)


@pytest.fixture
def listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """nvidia-smi, which lists three GPUs by number and UUID."""
    lines = [f"GPU {n}: NVIDIA H200 (UUID: {uuid})" for n, uuid in enumerate(UUIDS)]
    install(tmp_path / "bin", "nvidia-smi", *lines)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")


def hold(count: int = 1) -> tuple[subprocess.Popen[str], str]:
    """Start a process that holds GPUs until it is killed; return it and what it said first."""
    code = HOLD.format(package=PACKAGE, count=count)
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("0,2", ["0", "2"]),
        ("1,1", ["1"]),
        ("", []),
        ("-1", []),
        ("GPU-a, GPU-b", ["GPU-a", "GPU-b"]),
    ],
)
def test_the_environment_says_which_gpus_there_are(
    value: str, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    assert gpu.visible() == expected


def test_gpus_of_amd_are_those_that_rocm_smi_lists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = ["device,Device Name,Device ID", "card0,MI300X,0x74a1", "card1,MI300X,0x74a1"]
    install(tmp_path, "rocm-smi", *lines)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert gpu.visible() == ["0", "1"]
    assert gpu.computes_bfloat16() is None
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "1")
    with gpu.lease() as taken:
        assert taken == "1"
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", "7.1")
    assert doctor._gpu()["torch"] == "ROCm 7.1"


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


@pytest.mark.parametrize(("value", "expected"), [("4", "4"), ("", None)])
def test_one_gpu_of_unknown_uuid_or_none_needs_no_lock(
    value: str, expected: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    with gpu.lease() as name, gpu.lease() as other:
        assert name == other == expected
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("listed")
@pytest.mark.parametrize("other", ["GPU-0a1b-2c", "GPU-0a"])  # CUDA takes a UUID's beginning too
def test_a_waiting_job_says_for_whom_whatever_project_holds_the_only_gpu(
    other: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    process, name = hold()
    assert name == "1"
    said: list[str] = []

    def say(line: str) -> None:
        said.append(line)
        process.kill()

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", other)  # the same one, by its other name
    with gpu.lease(say) as device:
        assert device == other
    process.wait()
    who = f"process {process.pid} on {socket.gethostname()} (run cats in {Path.cwd()})"
    assert said == [f"waiting for a GPU: {who} holds {other}", f"GPU: {other}"]
    assert (tmp_path / f"latentmake-{os.getuid()}").stat().st_mode & 0o777 == 0o700


@pytest.mark.usefixtures("listed")
def test_several_gpus_are_locked_in_the_order_of_their_uuid(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")  # the last by its UUID
    first, name = hold()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    several, said = hold(3)
    assert (name, said) == ("0", "waits")
    one, said = hold()  # the others are taken
    assert said == "waits"
    first.kill()
    assert several.stdout is not None and several.stdout.readline() == "0,1,2\n"
    several.kill()
    assert one.stdout is not None and one.stdout.readline().strip() in {"0", "1", "2"}
    one.kill()
    for process in (first, several, one):
        process.wait()


@pytest.mark.usefixtures("listed")
@pytest.mark.parametrize("shown", ["0,1,2", "1"])
def test_an_allocation_has_its_gpus_for_itself(
    shown: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROCR_VISIBLE_DEVICES" if shown == "1" else "CUDA_VISIBLE_DEVICES", shown)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    with gpu.hold(3, "run cats", print) as taken:
        assert taken == shown
    assert not (tmp_path / f"latentmake-{os.getuid()}").exists()


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


no_gpu = pytest.mark.skipif(
    torch.cuda.is_available() or torch.backends.mps.is_available(), reason="torch sees a GPU"
)


@no_gpu
@pytest.mark.parametrize("named", [True, False])
def test_a_gpu_that_torch_does_not_see_is_refused_in_torchs_words(
    named: bool, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    if named:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    else:
        request.getfixturevalue("listed")
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises((RuntimeError, AssertionError)) as torchs:
        torch.cuda.init()
    with pytest.raises(DeviceError) as caught:
        pick_device()
    line = str(caught.value)
    assert line.startswith(
        f"GPU {3 if named else '0, 1, 2'}: torch {torch.__version__} does not see it: "
    )
    assert str(torchs.value) in line and "`CUDA_VISIBLE_DEVICES=`" in line and "\n" not in line


@no_gpu
def test_a_machine_without_gpus_and_one_that_hides_them_compute_on_the_cpu(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if not gpu.visible():
        assert pick_device() == torch.device("cpu")
    request.getfixturevalue("listed")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with gpu.lease() as name:
        assert name is None
        assert pick_device() == torch.device("cpu")


def test_one_clip_is_not_copied() -> None:
    clip, cpu = np.zeros((5, 8, 6, 3), np.uint8), torch.device("cpu")
    assert stacked([clip], cpu).data_ptr() == clip.ctypes.data
    clip.flags.writeable = False  # as Pillow's are, about which torch would warn
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert np.array_equal(stacked([clip], cpu).numpy()[0], clip)


def test_a_machine_without_a_gpu_is_a_note_of_the_checklist_and_no_failure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(findings.sys, "platform", "linux")
    monkeypatch.setenv("PATH", str(tmp_path))  # neither nvidia-smi nor sbatch
    for name in ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    (found,) = findings.gpu_findings(here=False)
    assert found == ("GPU", "warning", "no GPU was found: training will be slow")
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(findings.sys.modules, "torch")
    for cuda, without in (("None", True), ("'13.0'", False)):
        version = f"cuda: Optional[str] = {cuda}\nhip: Optional[str] = None\n"
        (tmp_path / "torch/version.py").write_text(version)
        (found,) = findings.gpu_findings()
        assert ("torch is built without CUDA" in found.note) is without
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert not [*findings.gpu_findings()]
