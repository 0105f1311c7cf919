"""Commands of one folder: the lock of a killed build is removed, that of any other is not."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from latentmake.plan.processes import enter

LOCK = Path(".snakemake/locks/0.output.lock")


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".latentmake").mkdir()
    LOCK.parent.mkdir(parents=True)


def command(*, cluster: bool = False, locks: bool = False) -> None:
    """Begin a command, let it lock, and let it end: killed, where it `locks`."""
    held = enter(cluster=cluster)
    assert held is not None
    if locks:
        LOCK.touch()
    held.close()


def test_the_lock_of_a_killed_build_is_removed_with_a_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    command(locks=True)
    assert capsys.readouterr().err == ""
    command()
    assert not LOCK.exists()
    assert "its lock of this folder is removed" in capsys.readouterr().err


def test_what_a_killed_build_left_half_written_is_removed() -> None:
    kept = [Path("runs/cats/.training.lock"), Path("runs/cats/.old.latentmake-partial/weights")]
    left = [Path(folder, ".0a.1.latentmake-partial") for folder in ("reports", "runs/cats/samples")]
    for path in (*kept, *left):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    command(locks=True)
    assert all(path.exists() for path in (*kept, *left))
    command()
    assert all(path.exists() for path in kept) and not any(path.exists() for path in left)


def test_the_lock_of_a_build_that_runs_stays() -> None:
    running = enter(cluster=False)
    LOCK.touch()
    command()
    assert LOCK.exists()
    assert running is not None
    running.close()


def test_the_lock_of_a_build_on_a_cluster_stays() -> None:
    command(cluster=True, locks=True)
    command()
    command(cluster=True)
    assert LOCK.exists()


def test_the_lock_of_another_machine_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it came while a build of this one ran: it may know nothing of our locks."""
    running = enter(cluster=False)
    LOCK.with_name("1.output.lock").touch()
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(socket, "gethostname", lambda: "elsewhere")
        command(locks=True)
    assert running is not None
    running.close()
    command()
    assert LOCK.exists()


def test_a_lock_of_nobody_knows_whom_stays() -> None:
    LOCK.touch()
    command()
    command()
    assert LOCK.exists()
