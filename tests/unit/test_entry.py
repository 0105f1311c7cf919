"""What the system refuses ends a plan and a job with one line, and finished work stays."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from latentmake.entry import exit_on_mistake, logged


def test_a_plan_ends_with_one_line_where_the_system_refuses_a_call(tmp_path: Path) -> None:
    place = tmp_path / "loop"
    place.symlink_to(place)
    with pytest.raises(SystemExit) as refused, exit_on_mistake():
        place.read_bytes()
    line = str(refused.value)
    assert line.startswith(f"error: {place}: Too many levels of symbolic links; correct this,")
    assert "\n" not in line


def test_a_job_ends_with_one_line_where_a_file_is_protected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place, log = tmp_path / "kept", tmp_path / "log"
    place.touch()
    if subprocess.run(["chattr", "+i", place], capture_output=True).returncode:
        pytest.skip("a file that nobody may change needs the rights of root")
    try:
        with pytest.raises(SystemExit) as refused, logged(str(log)):
            place.unlink()
    finally:
        subprocess.run(["chattr", "-i", place], check=True)
    assert refused.value.code == 1
    line = f"error: {place}: the system does not permit this change; remove the write protection"
    assert log.read_text().startswith(line) and len(log.read_text().splitlines()) == 1
    assert line in capsys.readouterr().err


def test_a_job_says_on_a_full_disk_that_it_is_full(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused, logged("/dev/full"):
        Path("/dev/full").write_text("more than there is room for")
    assert refused.value.code == 1
    assert "error: a file: no space left on the disk; free some space" in capsys.readouterr().err


def test_a_fault_of_ours_keeps_its_traceback(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), exit_on_mistake():
        (tmp_path / "ours").read_bytes()
    with pytest.raises(OSError, match="Bad file"), exit_on_mistake():
        os.read(9999, 1)
